"""What the objects that answer calls share: how they ask the server, and what they read of every call."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from postdate.broker.broker import Broker
from postdate.errors import PostdateError
from postdate.server.grpc.call import Call
from postdate.server.grpc.client import GrpcClient, OnReply
from postdate.wire.frame import Command
from postdate.wire.messaging import CallError

IN_ORDER_SETTING = "consumeMessageOrderly"  # of a group, RocketMQ's


class CallRequests(Protocol):
    """How calls ask the server. The service provides it, and says what each call does."""

    def ask(
        self, call: Call, code: int, fields: Mapping[str, Any], on_reply: OnReply, body: bytes = b""
    ) -> Command: ...  # fmt: skip
    def withdraw(self, client: GrpcClient, command: Command) -> bool: ...
    def refuse(self, call: Call, error: Exception) -> None: ...
    def note_reader(self, call: Call, group: str, topic: str, expression: Any) -> None: ...
    def handle_collected(self) -> None: ...
    def release(self, client: GrpcClient) -> None: ...


def name_of(resource: Any, check: Callable[[str], None], code: int) -> str:
    """Returns the name of a topic or a group. Raises CallError with a code for one that cannot be."""
    name: str = resource.name
    try:
        check(name)
    except PostdateError as error:
        raise CallError(code, str(error)) from error
    return name


def is_in_order(broker: Broker, group: str) -> bool:
    """Returns whether a group is given the messages of a queue in order: its settings say so."""
    return broker.view.group_settings(group).get(IN_ORDER_SETTING) is True
