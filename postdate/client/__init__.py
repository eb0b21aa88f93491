"""The Python client, blocking and asyncio. It knows the broker over the wire alone, and works with RocketMQ's too.

    blocking.py       Client: the asyncio client in a thread        asynchronous.py   AsyncClient
    producer.py       send, cancel                                  consumer.py       a member of a group
    jobs.py           cancel and postpone by predicate
    outgoing.py       messages to send, receipts                    received.py       messages that came
    routes.py         where topics live                             connection.py     requests and answers
    wanted.py         what a consumer is asked to do                membership.py     our place in a group
    backlog.py        what waits to be handed out                   returns.py        what is sent back
    allocation.py     who reads which queue                         progress.py       what is acknowledged
    faults.py         what can go wrong                             spans.py          delays and instants
    identity.py       who we are

`import postdate` gives the same names.
"""

from postdate.client.asynchronous import AsyncClient, connect_async
from postdate.client.blocking import Client, connect
from postdate.client.errors import BrokerError, Disconnected, TimedOut, Unavailable, Unreachable
from postdate.client.jobs import Changed
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
