"""The receiving side: messages that are taken once."""

from pillarbox.inbox.inbox import Inbox
from pillarbox.inbox.message import Message
from pillarbox.inbox.retention import check_window, longest_redelivery, warn_window

__all__ = ["Inbox", "Message", "check_window", "longest_redelivery", "warn_window"]
