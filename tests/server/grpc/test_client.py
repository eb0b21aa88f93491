"""A client as the objects that answer requests know it."""

from pathlib import Path
from typing import Any

from postdate.server.grpc.client import GrpcClient, RenewedLease
from postdate.server.peer import Peer
from postdate.wire import codes
from postdate.wire.bodies import parse_subscription
from postdate.wire.frame import Command, encode, reply
from postdate.wire.requests import ClientRequest, Request
from tests.support.grpc_client import serving_grpc
from tests.support.server import Served


def client_of(served: Served, answers: list[Any] | None = None) -> GrpcClient:
    heard = [] if answers is None else answers
    return served.call(
        lambda: GrpcClient(served.dispatcher, "alice", "c1", lambda client, answer: heard.append((client, answer)))
    )


def test_each_answer_reaches_whoever_has_asked(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        client, heard = client_of(served), list[tuple[str, int]]()
        first = client.make_command(Request.HEART_BEAT, {}, lambda answer: heard.append(("first", answer.code)))
        second = client.make_command(Request.HEART_BEAT, {}, lambda answer: heard.append(("second", answer.code)))
        client.write(reply(second, codes.SUCCESS) + reply(first, codes.SYSTEM_BUSY))
        assert heard == [("second", codes.SUCCESS), ("first", codes.SYSTEM_BUSY)]
        client.write(reply(first, codes.SUCCESS))
        assert len(heard) == 2, "an answer counts once"


def test_an_answer_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        client, heard = client_of(served), list[Command]()
        command = client.make_command(Request.HEART_BEAT, {}, heard.append)
        client.forget_command(command)
        client.write(reply(command, codes.SUCCESS))
        assert heard == []


def test_a_question_of_an_operator_is_refused_and_a_notice_is_not_answered(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        answers: list[Any] = []
        client = client_of(served, answers)
        client.write(encode(Command(ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED, {}, flag=codes.FLAG_ONEWAY)))
        assert answers == []
        client.write(encode(Command(Request.GET_CONSUMER_RUNNING_INFO, {}, opaque=5)))
        ((asked, answer),) = answers
        assert (asked, answer.opaque, answer.code) == (client, 5, codes.REQUEST_CODE_NOT_SUPPORTED)


def test_a_client_is_paused_while_one_of_its_connections_is(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        client, first, second = client_of(served), Peer(), Peer()
        for peer in (first, second):
            client.note_peer(peer, served.dispatcher)
        seen = [client.is_paused]
        second.is_paused = True
        client.note_paused()
        seen.append(client.is_paused)
        client.forget_peer(second, 5)
        seen.append(client.is_paused)
        assert (seen, client.lost_at_ns) == ([False, True, False], None)
        client.forget_peer(first, 7)
        assert client.lost_at_ns == 7
        client.note_peer(second, served.dispatcher)
        assert client.is_paused
        assert client.lost_at_ns is None


def test_a_client_that_has_something_is_waited_for(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        client = client_of(served)
        seen = [client.is_worth_waiting]
        client.leases["g", "orders", 0, 1] = RenewedLease(1, 2, 3, None, 0)
        seen.append(client.is_worth_waiting)
        client.leases.clear()
        client.subscriptions["g"] = {"orders": parse_subscription("orders", "*")}
        client.beaten_at_ns["g"] = 5
        seen.append(client.is_worth_waiting)
        client.forget_group("g")
        seen.append(client.is_worth_waiting)
        assert (seen, client.beaten_at_ns) == ([False, True, True, False], {})
