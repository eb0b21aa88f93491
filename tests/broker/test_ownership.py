"""Which tables a broker accepts when a pipeline registers."""

import pytest

from postdate.broker.broker import Broker
from postdate.contract import TableMarks
from postdate.errors import ForeignTable
from postdate.storage.log import NO_BATCH
from tests.support.core import FAR_MS, T0, Data, message, settled


def marks_of(broker: Broker) -> TableMarks:
    """What a table has seen that follows the broker's state."""
    broker.flush()
    assert broker.view.log_mark is not None
    position, mark = broker.view.log_mark
    return TableMarks(broker.identity, broker.fold.far.length, position, mark)


def register(broker: Broker, marks: TableMarks) -> int:
    return int(settled(broker, broker.register_pipeline(T0, table="t", marks=marks)))


def test_a_broker_accepts_a_table_that_has_seen_its_log(data: Data) -> None:
    broker = data.open()
    broker.send([message("one")], T0)
    marks = marks_of(broker)
    broker.send([message("two")], T0)
    assert [register(broker, marks), register(broker, marks_of(broker))] == [1, 2]
    assert register(broker, TableMarks()) == 3  # a pipeline of an earlier version


def test_a_table_of_another_identity_is_refused(data: Data) -> None:
    broker = data.open()
    with pytest.raises(ForeignTable, match=f"its identity is {'e' * 32}, ours is {broker.identity}; restore"):
        register(broker, marks_of(broker)._replace(identity="e" * 32))
    assert broker.view.far.epoch == 0


def test_a_log_that_ends_before_the_seen_place_is_refused(data: Data) -> None:
    broker = data.open()
    marks = marks_of(broker)
    with pytest.raises(ForeignTable, match=f"the batch at {broker.log.end}, the log ends at {broker.log.end}; was"):
        register(broker, marks._replace(position=broker.log.end))
    with pytest.raises(ForeignTable, match="has another batch there"):
        register(broker, marks._replace(mark=marks.mark ^ 1))
    with pytest.raises(ForeignTable, match="has another batch there"):
        register(broker, marks._replace(position=marks.position + 8))
    register(broker, marks)
    with pytest.raises(ForeignTable, match="it has taken 1 far rows, the log has 0"):
        register(broker, marks._replace(far=1))


def test_a_broker_without_a_pipeline_so_far_has_no_table_that_has_taken_rows(data: Data) -> None:
    """Also where the table is of an earlier version, and the log has as many far rows by now."""
    broker = data.open()
    broker.send([message(str(n), due=T0 + FAR_MS) for n in range(5)], T0)
    broker.flush()
    with pytest.raises(ForeignTable, match=r"belongs to another broker: it has taken 3 far rows, and no pipeline"):
        register(broker, TableMarks(far=3))
    assert register(broker, TableMarks()) == 1
    assert register(broker, TableMarks(far=3)) == 2  # committed, and not staged


def test_a_log_that_retention_has_shortened_beyond_the_seen_place_is_newer(data: Data) -> None:
    broker = data.open()
    marks = marks_of(broker)
    while len(broker.log.segment_numbers()) < 2:
        broker.send([message("x" * 1_000)], T0)
        broker.flush()
    assert broker.log.mark_at(marks.position) == marks.mark
    broker.log.remove_segment(0)
    data.damaged = True  # nothing of what waits was looked at
    assert broker.log.mark_at(marks.position) is None
    assert broker.log.mark_at(broker.log.end) == NO_BATCH
    assert register(broker, marks._replace(mark=7)) == 1


def test_the_last_batch_is_known_after_a_restart(data: Data) -> None:
    broker = data.open()
    broker.send([message("one")], T0)
    marks = marks_of(broker)
    data.close(broker)
    assert marks_of(data.open()) == marks
