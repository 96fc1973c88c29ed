"""Pillarbox: a transactional outbox. An event put in a transaction is delivered at least once, in order per key."""

from pillarbox.errors import (
    ConfigError,
    InvalidEvent,
    LayoutError,
    MissingExtra,
    PayloadTooLarge,
    PillarboxError,
    ReceiptPending,
    SchemaError,
    SinkUnavailable,
    StoreUnavailable,
    TransactionError,
    Unsupported,
)
from pillarbox.event import Claim, Dead, Delivered, Event, Outcome, Released, Retry
from pillarbox.group import RelayGroup, route_relays
from pillarbox.hooks import Hook
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
    "Batch",
    "ByException",
    "CallableSink",
    "Claim",
    "ConfigError",
    "Constant",
    "Counts",
    "Dead",
    "Delivered",
    "Event",
    "Exponential",
    "Filter",
    "Hook",
    "InvalidEvent",
    "Layout",
    "LayoutError",
    "LimitedSink",
    "Linear",
    "MissingExtra",
    "NoRetry",
    "Outbox",
    "Outcome",
    "PayloadTooLarge",
    "PillarboxError",
    "Receipt",
    "ReceiptPending",
    "Relay",
    "RelayGroup",
    "Released",
    "Retry",
    "RetryPolicy",
    "Route",
    "Routes",
    "SchemaError",
    "Settlement",
    "Sink",
    "SinkUnavailable",
    "Store",
    "StoreUnavailable",
    "TransactionError",
    "TransformSink",
    "Unsupported",
    "__version__",
    "open_sink",
    "open_store",
    "route_relays",
]
