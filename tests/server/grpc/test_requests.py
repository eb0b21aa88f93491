"""What the objects that answer calls read of every call."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.message import check_group, check_topic
from postdate.server.grpc.requests import is_in_order, name_of
from postdate.wire import messaging
from postdate.wire.messaging import MESSAGES, CallError
from postdate.wire.requests import Request
from tests.support.grpc_client import GROUP, serving_grpc
from tests.support.peer import connected


def test_a_name_is_that_of_its_resource_whatever_its_namespace_is() -> None:
    resource = MESSAGES["Resource"](name="orders", resource_namespace="mine")
    assert name_of(resource, check_topic, messaging.ILLEGAL_TOPIC) == "orders"


@pytest.mark.parametrize(
    ("check", "code"), [(check_topic, messaging.ILLEGAL_TOPIC), (check_group, messaging.ILLEGAL_GROUP)]
)
def test_a_name_that_cannot_be_has_the_code_of_its_kind(check: Any, code: int) -> None:
    with pytest.raises(CallError) as caught:
        name_of(MESSAGES["Resource"](name="no spaces"), check, code)
    assert caught.value.code == code


@pytest.mark.parametrize(("settings", "is_so"), [({}, False), ({"consumeMessageOrderly": True}, True),
                                                 ({"consumeMessageOrderly": "yes"}, False)])  # fmt: skip
def test_a_group_keeps_order_if_its_settings_say_so(tmp_path: Path, settings: dict[str, Any], is_so: bool) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer:
        body = orjson.dumps({"groupName": GROUP, **settings})
        peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
        assert served.call(lambda: is_in_order(served.broker, GROUP)) is is_so
        assert served.call(lambda: is_in_order(served.broker, "nobody")) is False
