"""Leases of the in-process broker: what a connected client has in hand survives a move of the calendar."""

from collections.abc import Iterator

import pytest

import postdate
from postdate.testing import InProcessBroker
from postdate.wire import codes
from tests.server.requests.test_pop import acknowledge, change, pop
from tests.support.core import MINUTE_MS, SECOND_MS
from verify.faults.peer import Peer

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker, postdate.connect(broker.address) as client:
        client.send(TOPIC, "here", queue=0)
        yield broker


@pytest.fixture
def peer(broker: InProcessBroker) -> Iterator[Peer]:
    peer = connect(broker)
    yield peer
    peer.close()


def connect(broker: InProcessBroker) -> Peer:
    return Peer(int(broker.address.rpartition(":")[2]))


def test_what_a_connected_client_has_in_hand_stays_there_for_a_year(broker: InProcessBroker, peer: Peer) -> None:
    answer = pop(peer)
    broker.advance("365d")
    assert pop(peer).records == []
    assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS


def test_a_renewal_keeps_it_as_the_pop_did(broker: InProcessBroker, peer: Peer) -> None:
    answer = pop(peer, invisibleTime=30 * SECOND_MS)
    broker.advance("1d")
    assert change(peer, answer, answer.records[0], 30 * SECOND_MS).code == codes.SUCCESS
    broker.advance("1d")
    assert pop(peer).records == []


def test_a_retry_comes_again_by_the_calendar(broker: InProcessBroker, peer: Peer) -> None:
    answer = pop(peer)
    assert change(peer, answer, answer.records[0], 10 * SECOND_MS).code == codes.SUCCESS
    broker.advance("9.999s")
    assert pop(peer).records == []
    broker.advance("1ms")
    (record,) = pop(peer).records
    assert record.reconsume_times == 1


def test_what_a_client_left_behind_comes_again_by_the_calendar(broker: InProcessBroker, peer: Peer) -> None:
    dying = connect(broker)
    assert pop(dying, invisibleTime=MINUTE_MS).records
    dying.close()
    broker.advance("59.999s")
    assert pop(peer).records == []
    broker.advance("1ms")
    assert [record.body for record in pop(peer).records] == [b"here"]


def test_what_was_in_hand_when_the_broker_closed_comes_again_after_it_opens(broker: InProcessBroker) -> None:
    dying = connect(broker)
    assert pop(dying, invisibleTime=MINUTE_MS).records
    dying.close()
    broker.close()
    with InProcessBroker(disk=broker.disk, clock=broker.clock) as second:
        peer = connect(second)
        assert pop(peer).records == []
        second.advance("1m")
        assert [record.body for record in pop(peer).records] == [b"here"]
        peer.close()


def test_a_broker_with_a_bound_of_its_own_ends_leases_by_the_calendar() -> None:
    with InProcessBroker(invisible_ms_max=MINUTE_MS) as broker, postdate.connect(broker.address) as client:
        client.send(TOPIC, "here")
        peer = connect(broker)
        assert pop(peer, invisibleTime=2 * MINUTE_MS).code == codes.INVALID_PARAMETER
        assert pop(peer).records
        broker.advance("1m")
        assert pop(peer).records
        peer.close()
