"""Pillarbox: a transactional outbox and inbox. What is committed is delivered, in order per key, and taken once."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pillarbox.actions import Action, ActionLog
    from pillarbox.errors import (
        ActionError,
        ActionRepeated,
        ConfigError,
        InvalidEvent,
        LayoutError,
        MissingExtra,
        PayloadTooLarge,
        PillarboxError,
        ReceiptPending,
        Reject,
        RetryLater,
        SchemaError,
        SinkUnavailable,
        Skip,
        StoreRefused,
        StoreUnavailable,
        TransactionError,
        Unsupported,
    )
    from pillarbox.event import Claim, Dead, Delivered, Event, Outcome, Released, Retry
    from pillarbox.group import RelayGroup, route_relays
    from pillarbox.handlers import Context, Handlers, HandlerSink, handler_relays
    from pillarbox.hooks import Hook
    from pillarbox.inbox import Inbox, Message
    from pillarbox.layouts import Layout
    from pillarbox.outbox import Outbox
    from pillarbox.receipt import Receipt
    from pillarbox.relay import Relay
    from pillarbox.retry import ByException, Constant, Exponential, Linear, NoRetry, RetryPolicy
    from pillarbox.routing import Route, Routes
    from pillarbox.sinks import Sink, open_sink
    from pillarbox.sinks.callable import CallableSink
    from pillarbox.sinks.limit import LimitedSink
    from pillarbox.sinks.transform import TransformSink
    from pillarbox.sinks.wrapper import SinkWrapper
    from pillarbox.stores import Batch, Counts, Filter, Settlement, Store
    from pillarbox.stores.url import open_store

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ActionError",
    "ActionLog",
    "ActionRepeated",
    "Batch",
    "ByException",
    "CallableSink",
    "Claim",
    "ConfigError",
    "Constant",
    "Context",
    "Counts",
    "Dead",
    "Delivered",
    "Event",
    "Exponential",
    "Filter",
    "HandlerSink",
    "Handlers",
    "Hook",
    "Inbox",
    "InvalidEvent",
    "Layout",
    "LayoutError",
    "LimitedSink",
    "Linear",
    "Message",
    "MissingExtra",
    "NoRetry",
    "Outbox",
    "Outcome",
    "PayloadTooLarge",
    "PillarboxError",
    "Receipt",
    "ReceiptPending",
    "Reject",
    "Relay",
    "RelayGroup",
    "Released",
    "Retry",
    "RetryLater",
    "RetryPolicy",
    "Route",
    "Routes",
    "SchemaError",
    "Settlement",
    "Sink",
    "SinkUnavailable",
    "SinkWrapper",
    "Skip",
    "Store",
    "StoreRefused",
    "StoreUnavailable",
    "TransactionError",
    "TransformSink",
    "Unsupported",
    "__version__",
    "handler_relays",
    "open_sink",
    "open_store",
    "route_relays",
]

# Loaded when it is asked for: the command line must take signals before the second that all of it takes.
_NAMES: Final = {
    "pillarbox.actions": "Action ActionLog",
    "pillarbox.errors": (
        "ActionError ActionRepeated ConfigError InvalidEvent LayoutError MissingExtra PayloadTooLarge "
        "PillarboxError ReceiptPending Reject RetryLater SchemaError SinkUnavailable Skip "
        "StoreRefused StoreUnavailable TransactionError Unsupported"
    ),
    "pillarbox.event": "Claim Dead Delivered Event Outcome Released Retry",
    "pillarbox.group": "RelayGroup route_relays",
    "pillarbox.handlers": "Context Handlers HandlerSink handler_relays",
    "pillarbox.hooks": "Hook",
    "pillarbox.inbox": "Inbox Message",
    "pillarbox.layouts": "Layout",
    "pillarbox.outbox": "Outbox",
    "pillarbox.receipt": "Receipt",
    "pillarbox.relay": "Relay",
    "pillarbox.retry": "ByException Constant Exponential Linear NoRetry RetryPolicy",
    "pillarbox.routing": "Route Routes",
    "pillarbox.sinks": "Sink open_sink",
    "pillarbox.sinks.callable": "CallableSink",
    "pillarbox.sinks.limit": "LimitedSink",
    "pillarbox.sinks.transform": "TransformSink",
    "pillarbox.sinks.wrapper": "SinkWrapper",
    "pillarbox.stores": "Batch Counts Filter Settlement Store",
    "pillarbox.stores.url": "open_store",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = found
        return found
    try:
        return importlib.import_module(f"pillarbox.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"pillarbox.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
