"""Pillarbox: a transactional outbox and inbox. What is committed is delivered, in order per key, and taken once."""

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
    "Skip",
    "Store",
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
