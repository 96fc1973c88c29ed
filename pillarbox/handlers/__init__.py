"""Functions of this process that handle events: registered by type, run by relays like any other sink."""

from pillarbox.handlers.context import Context, Middleware, Next, Provide
from pillarbox.handlers.registry import Handler, Handlers
from pillarbox.handlers.relays import handler_relays
from pillarbox.handlers.sink import HandlerSink

__all__ = ["Context", "Handler", "HandlerSink", "Handlers", "Middleware", "Next", "Provide", "handler_relays"]
