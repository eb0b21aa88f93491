"""What a request needs, as its fields and its body say."""

from contextlib import suppress

import orjson
import pytest

from postdate.access.rules import Action, Resource, ResourceKind
from postdate.errors import PostdateError
from postdate.wire import rights
from postdate.wire.requests import Request
from postdate.wire.rights import Asked, ask_cluster, ask_group, ask_topic

PUB, SUB, GET, UPDATE = Action.PUB, Action.SUB, Action.GET, Action.UPDATE


def needs(read: rights.ReadBody, body: object) -> list[Asked]:
    return list(read(orjson.dumps(body)))


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
def test_a_retry_or_dead_letter_topic_belongs_to_its_group(prefix: str) -> None:
    assert ask_topic(f"{prefix}billing", PUB) == Asked(Resource(ResourceKind.GROUP, "billing"), (SUB,))
    assert ask_topic(f"{prefix}billing", SUB, GET) == ask_group("billing", SUB, GET)
    assert ask_topic("billing", PUB) == Asked(Resource(ResourceKind.TOPIC, "billing"), (PUB,))


def test_a_heartbeat_needs_each_group_and_each_topic() -> None:
    subscriptions = [{"topic": "orders"}, {"topic": "%RETRY%g"}]
    body = {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": subscriptions}]}
    assert needs(rights.of_heartbeat, body) == [ask_group("g", SUB), ask_topic("orders", SUB), ask_group("g", SUB)]
    assert needs(rights.of_heartbeat, {"clientID": "c", "producerDataSet": [{"groupName": "p"}]}) == []


def test_bodies_name_what_they_need() -> None:
    assert needs(rights.of_lock, {"consumerGroup": "g", "clientId": "c"}) == [ask_group("g", SUB)]
    body = {"topic": "orders", "consumerGroup": "g", "clientId": "c"}
    assert needs(rights.of_assignment, body) == [ask_group("g", SUB), ask_topic("orders", SUB)]
    assert needs(rights.of_mode, body) == [ask_group("g", UPDATE)]
    assert needs(rights.of_group_settings, {"groupName": "g"}) == [ask_group("g", Action.CREATE, UPDATE)]
    assert needs(rights.of_dead_letters, {"group": "g"}) == [ask_group("g", SUB, UPDATE)]
    acks = {"acks": [{"c": "g", "t": "orders"}, {"c": "g", "t": "orders"}]}
    assert needs(rights.of_batch_ack, acks) == [ask_group("g", SUB), ask_topic("orders", SUB)]


def test_calls_about_jobs_look_change_or_are_internal() -> None:
    for call in ("find", "list"):
        assert needs(rights.of_job, {"call": call}) == [ask_cluster(GET)]
    for call in ("begin", "ask", "adopt", "fail"):
        assert needs(rights.of_job, {"call": call}) == [ask_cluster(UPDATE)._replace(is_change=True)]
    for call in rights.PIPELINE_CALLS:
        assert needs(rights.of_job, {"call": call})[0].is_internal
    assert needs(rights.of_job, {"call": "made up later"}) == [ask_cluster(UPDATE)]


@pytest.mark.parametrize("request_", [request for request in Request if request.right.body])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"acks": 7}', b'{"call": 7}', b'{"groupName": {}}'])
def test_a_body_that_cannot_be_read_is_an_error_or_needs_nothing(request_: Request, body: bytes) -> None:
    assert request_.right.body is not None
    with suppress(PostdateError):
        found = list(request_.right.body(body))
        assert found == ([ask_cluster(UPDATE)] if request_ == Request.JOB else [])


def test_a_right_says_what_it_needs() -> None:
    assert str(Request.PULL_MESSAGE.right) == "Group Sub (consumerGroup), Topic Sub (topic)"
    assert str(Request.GET_ROUTEINFO_BY_TOPIC.right) == "open"
    assert str(Request.STAGE.right) == "internal"
