"""Postdate: a message broker for messages that must arrive later. RocketMQ clients talk to it.

This package offers the client's names, such as `postdate.connect()`, and `postdate.pending()`. It loads them on first
use: every import of a module of ours runs this file, and most need neither sockets nor event loops nor Spark.
"""

# ruff: noqa: F403, F405 - a type checker learns all names of the client by one star
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.client import *
    from postdate.spark.pending.pending import pending

__version__ = "0.1.0"
__all__ = [
    "AsyncClient", "AsyncReceivedMessage", "BrokerError", "Cancelled", "CancelledMessage", "Changed", "Client",
    "DeadLetter", "Disconnected", "FlowControl", "FoundMessage", "GroupNotFound", "IllegalMessage", "Moved",
    "MovedMessage", "NoPermission", "Outgoing", "PostdateError", "ProtocolError", "QueueReset", "Receipt",
    "ReceivedMessage", "Refused", "TimedOut", "TopicNotFound", "Unavailable",
    "Unreachable", "Untrusted", "UsageError", "connect", "connect_async", "pending",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "pending":
            from postdate.extras import require_extra

            require_extra("spark", "postdate.pending")
            from postdate.spark.pending import pending as home
        else:
            from postdate import client as home
        value = globals()[name] = getattr(home, name)  # so that Python finds it by itself the next time
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
