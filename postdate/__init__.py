"""Postdate: a broker for messages that must arrive later, spoken to by RocketMQ clients.

The names of the client are here too: `postdate.connect()`, and so is `postdate.pending()`. They are loaded when the
first of them is used: every import of ours runs this file, and most want neither sockets nor event loops nor Spark.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.client import (
        AsyncClient,
        AsyncReceivedMessage,
        BrokerError,
        Cancelled,
        Changed,
        Client,
        Disconnected,
        FlowControl,
        GroupNotFound,
        IllegalMessage,
        NoPermission,
        Outgoing,
        PostdateError,
        ProtocolError,
        Receipt,
        ReceivedMessage,
        Refused,
        TimedOut,
        TopicNotFound,
        Unavailable,
        Unreachable,
        UsageError,
        connect,
        connect_async,
    )
    from postdate.spark.pending.pending import pending

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncReceivedMessage",
    "BrokerError",
    "Cancelled",
    "Changed",
    "Client",
    "Disconnected",
    "FlowControl",
    "GroupNotFound",
    "IllegalMessage",
    "NoPermission",
    "Outgoing",
    "PostdateError",
    "ProtocolError",
    "Receipt",
    "ReceivedMessage",
    "Refused",
    "TimedOut",
    "TopicNotFound",
    "Unavailable",
    "Unreachable",
    "UsageError",
    "connect",
    "connect_async",
    "pending",
]


if not TYPE_CHECKING:  # or a type checker would believe that there is every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_home_of(name), name)  # the next time it is found without asking here
        return value

    def _home_of(name: str) -> object:
        if name == "pending":
            from postdate.spark.pending import pending

            return pending
        from postdate import client

        return client
