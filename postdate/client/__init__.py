"""The Python client, blocking and asyncio. It knows the broker over the wire alone, and works with RocketMQ's too.

`import postdate` gives the same names. They are loaded when the first of them is used: Spark's executors import
`postdate.client.errors`, and have neither orjson nor uvloop.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.client.admin import Changed
    from postdate.client.asynchronous import AsyncClient, connect_async
    from postdate.client.blocking import Client, connect
    from postdate.client.errors import BrokerError, Disconnected, TimedOut, Unavailable, Unreachable
    from postdate.client.outgoing import Outgoing, Receipt
    from postdate.client.received import AsyncReceivedMessage, ReceivedMessage
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
    from postdate.message import Cancelled

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
]


if not TYPE_CHECKING:  # or a type checker would believe that there is every name
    _HOMES = {
        "AsyncClient": "postdate.client.asynchronous",
        "AsyncReceivedMessage": "postdate.client.received",
        "BrokerError": "postdate.client.errors",
        "Cancelled": "postdate.message",
        "Changed": "postdate.client.admin",
        "Client": "postdate.client.blocking",
        "Disconnected": "postdate.client.errors",
        "FlowControl": "postdate.errors",
        "GroupNotFound": "postdate.errors",
        "IllegalMessage": "postdate.errors",
        "NoPermission": "postdate.errors",
        "Outgoing": "postdate.client.outgoing",
        "PostdateError": "postdate.errors",
        "ProtocolError": "postdate.errors",
        "Receipt": "postdate.client.outgoing",
        "ReceivedMessage": "postdate.client.received",
        "Refused": "postdate.errors",
        "TimedOut": "postdate.client.errors",
        "TopicNotFound": "postdate.errors",
        "Unavailable": "postdate.client.errors",
        "Unreachable": "postdate.client.errors",
        "UsageError": "postdate.errors",
        "connect": "postdate.client.blocking",
        "connect_async": "postdate.client.asynchronous",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
