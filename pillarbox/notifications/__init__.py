"""From an action log to handlers in this process: one notification for each event and handler, with its own progress.

`notification_relays` is in `pillarbox.notifications.relays`: handlers know what is here, and relays know handlers.
"""

from pillarbox.notifications.context import ActionContext, read_action

__all__ = ["ActionContext", "read_action"]
