"""The Python client, blocking and asyncio. It knows the broker over the wire alone, and works with RocketMQ's too.

`import postdate` gives the same names. They are loaded when the first of them is used: Spark's executors import
`postdate.client.errors`, and have neither orjson nor uvloop.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.client.admin import Changed, FoundMessage
    from postdate.client.asynchronous import AsyncClient, connect_async
    from postdate.client.blocking import Client, connect
    from postdate.client.dead_letters import DeadLetter
    from postdate.client.errors import BrokerError, Disconnected, TimedOut, Unavailable, Unreachable, Untrusted
    from postdate.client.keys import CancelledMessage, MovedMessage
    from postdate.client.outgoing import Outgoing, Receipt
    from postdate.client.received import AsyncReceivedMessage, ReceivedMessage
    from postdate.client.resets import QueueReset
    from postdate.errors import (
        FlowControl,
        GroupNotFound,
        IllegalMessage,
        NoPermission,
        PostdateError,
        ProtocolError,
        Refused,
        TopicNotFound,
        UsageError,
    )
    from postdate.message import Cancelled, Moved

__all__ = [
    "AsyncClient", "AsyncReceivedMessage", "BrokerError", "Cancelled", "CancelledMessage", "Changed", "Client",
    "DeadLetter", "Disconnected", "FlowControl", "FoundMessage", "GroupNotFound", "IllegalMessage", "Moved",
    "MovedMessage", "NoPermission", "Outgoing", "PostdateError", "ProtocolError", "QueueReset", "Receipt",
    "ReceivedMessage", "Refused", "TimedOut", "TopicNotFound", "Unavailable",
    "Unreachable", "Untrusted", "UsageError", "connect", "connect_async",
]  # fmt: skip


if not TYPE_CHECKING:  # or a type checker would believe that there is every name
    _HOMES = {
        "client.admin": ("Changed", "FoundMessage"),
        "client.asynchronous": ("AsyncClient", "connect_async"),
        "client.blocking": ("Client", "connect"),
        "client.dead_letters": ("DeadLetter",),
        "client.errors": ("BrokerError", "Disconnected", "TimedOut", "Unavailable", "Unreachable", "Untrusted"),
        "client.keys": ("CancelledMessage", "MovedMessage"),
        "client.outgoing": ("Outgoing", "Receipt"),
        "client.received": ("AsyncReceivedMessage", "ReceivedMessage"),
        "client.resets": ("QueueReset",),
        "message": ("Cancelled", "Moved"),
    }

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = next((home for home, names in _HOMES.items() if name in names), "errors")
        value = globals()[name] = getattr(import_module(f"postdate.{home}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
