"""The action log: what was done, recorded in the transaction that does it."""

from pillarbox.actions.action import Action
from pillarbox.actions.classify import classify_change
from pillarbox.actions.conflicts import DatabaseConflict
from pillarbox.actions.log import ActionLog

__all__ = ["Action", "ActionLog", "DatabaseConflict", "classify_change"]
