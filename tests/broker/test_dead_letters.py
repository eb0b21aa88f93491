"""Dead letters at the broker: which are open, what one record does, and what bounds it."""

import pytest

from postdate.broker.broker import Broker
from postdate.broker.dead_letters import DONE_GROUP
from postdate.broker.leasing import PopRequest
from postdate.config import Settings
from postdate.errors import FlowControl, NoPermission, TopicNotFound, UsageError
from postdate.message import Message
from postdate.testing import VirtualDisk
from tests.support.core import T0

GROUP, DEAD = "billing", "%DLQ%billing"


def opened(count: int, settings: Settings | None = None) -> Broker:
    """A broker with letters in one queue."""
    broker = Broker(VirtualDisk(), settings)
    broker.put_topic(DEAD, T0, read_queue_count=1, write_queue_count=1)
    for number in range(count):
        broker.send([Message(DEAD, str(number).encode())], T0)
    broker.flush()
    return broker


def open_offsets(broker: Broker, start: int = 0, count: int = 100) -> list[int]:
    return [letter.offset for letter in broker.dead_letters.open_letters(GROUP, 0, start, count)[0]]


def finish(broker: Broker, *offsets: int, at_ms: int = T0) -> int:
    count, _ = broker.dead_letters.finish(GROUP, [(0, offset) for offset in offsets], at_ms)
    broker.flush()
    return count


def test_letters_are_open_until_they_are_done_in_any_order() -> None:
    broker = opened(6)
    assert open_offsets(broker) == [0, 1, 2, 3, 4, 5]
    assert finish(broker, 4, 1) == 2
    assert open_offsets(broker) == [0, 2, 3, 5]
    assert finish(broker, 1, 4) == 0
    broker.advance(T0 + 5)  # their leases are over
    broker.flush()
    assert finish(broker, 0, at_ms=T0 + 5) == 1
    assert broker.fold.groups.offset(DONE_GROUP, DEAD, 0) == 2, "0 and 1 are done: the offset says so"
    assert set(broker.fold.leases.by_key) == {(DONE_GROUP, broker.view.queue_number(DEAD, 0), 4)}
    assert finish(broker, 2, 3, 5, at_ms=T0 + 10) == 3  # one more lease would be forgotten the next time
    assert open_offsets(broker) == []
    assert not broker.fold.leases.by_key
    broker.close()


def test_what_is_asked_in_pieces_goes_on_where_it_stopped() -> None:
    broker = opened(5)
    finish(broker, 0, 3)
    letters, stop = broker.dead_letters.open_letters(GROUP, 0, 0, 2)
    assert ([letter.offset for letter in letters], stop) == ([1, 2], 3)
    assert open_offsets(broker, stop) == [4]
    broker.close()


def test_letters_that_are_not_there_are_not_done() -> None:
    broker = opened(2)
    assert finish(broker, -1, 2, 99) == 0
    with pytest.raises(UsageError):
        broker.dead_letters.finish(GROUP, [(7, 0)], T0)
    with pytest.raises(TopicNotFound):
        broker.dead_letters.finish("nobody", [(0, 0)], T0)
    assert open_offsets(broker) == [0, 1]
    broker.close()


def test_letters_done_before_older_ones_are_bounded() -> None:
    broker = opened(6, Settings(group_popped_max=2))
    finish(broker, 4, 5)
    broker.advance(T0 + 5)
    broker.flush()
    with pytest.raises(FlowControl, match="resend or delete the oldest first"):
        finish(broker, 3)
    assert finish(broker, 0, 1, 2, 3, at_ms=T0 + 5) == 4
    assert open_offsets(broker) == []
    broker.close()


def test_a_second_record_knows_of_one_that_is_not_durable_yet() -> None:
    broker = opened(5)
    broker.dead_letters.finish(GROUP, [(0, offset) for offset in range(4)], T0)
    count, _ = broker.dead_letters.finish(GROUP, [(0, 0), (0, 4)], T0)
    broker.flush()
    assert count == 1
    assert open_offsets(broker) == []
    broker.close()


def test_nobody_pops_as_the_group_of_what_is_done() -> None:
    broker = opened(1)
    with pytest.raises(NoPermission):
        broker.leases.pop(PopRequest(DONE_GROUP, DEAD, [0], 1, 1_000, 1_000, 16), T0)
    broker.close()
