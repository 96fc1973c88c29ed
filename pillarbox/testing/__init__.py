"""What tests put in the place of a database and a destination."""

from pillarbox.sinks.memory import MemorySink
from pillarbox.stores.memory import MemoryReceipt, MemoryStore
from pillarbox.testing.clock import ManualClock

__all__ = ["ManualClock", "MemoryReceipt", "MemorySink", "MemoryStore"]
