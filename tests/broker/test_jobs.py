"""Jobs, as calls: what is refused before it is written, and what a decision takes."""

import dataclasses

import numpy as np
import pytest

from postdate.broker.broker import Broker
from postdate.broker.jobs import OPEN_MAX, require_job
from postdate.contract import Selection
from postdate.errors import CorruptSelection, FlowControl, PostdateError, Refused, TopicNotFound, UsageError
from postdate.state.jobs import DONE, FAILED, LOADING, RUNNING, WAITING, Job
from postdate.storage import selection
from postdate.storage.layout import SELECTED
from tests.support.core import DAY_MS, SMALL, T0, TOPIC, Data, message, registered, send, settled

FILE = ["_import-1.parquet", 100, 10, T0, T0 + 1, 1, 2]


def ask(broker: Broker, job_id: str = "job", op: str = "cancel", where: str = "true", by_ms: int = 0) -> Job:
    return require_job(settled(broker, broker.jobs.ask(job_id, op, where, by_ms, T0)))


def select(data: Data, broker: Broker, job: Job, queue: int | None = None) -> Selection:
    """Writes a selection of the first far message, as a pipeline uploads it."""
    row = broker.view.read_far(0, 1)[0]
    rows = np.zeros(1, SELECTED)
    rows["due"], rows["arrival"], rows["queue"] = row["due"], row["arrival"], row["queue"] if queue is None else queue
    name = f"{job.number:08d}-part"
    selection.write(data.disk, name, rows)
    return Selection(broker.view.far.epoch, job.number, ((name, 0),))


def decide(broker: Broker, selected: Selection) -> Job:
    return require_job(settled(broker, broker.jobs.decide(selected, broker.jobs.verify(selected), T0)))


# -- asking ------------------------------------------------------------------------------------------------------


def test_an_import_goes_from_loading_to_waiting_when_its_files_are_adopted(data: Data) -> None:
    broker = data.open()
    job = require_job(settled(broker, broker.jobs.begin("import", TOPIC, T0)))
    assert (job.state, job.topic) == (LOADING, TOPIC)
    job = require_job(settled(broker, broker.jobs.adopt("import", [FILE], 3, T0)))
    assert (job.state, job.rows, job.bad) == (WAITING, 10, 3)


def test_asking_again_with_the_same_id_answers_with_the_first_job(data: Data) -> None:
    broker = data.open()
    first, second = ask(broker, where="a = 1"), ask(broker, where="a = 2")
    assert (second.number, second.where) == (first.number, "a = 1")


def test_a_failed_job_leaves_its_id_to_the_next_one(data: Data) -> None:
    broker = data.open()
    first = ask(broker)
    failed = require_job(settled(broker, broker.jobs.fail("job", "no more", T0)))
    assert (failed.state, failed.reason) == (FAILED, "no more")
    assert ask(broker).number == first.number + 1


@pytest.mark.parametrize(
    ("job_id", "op", "where", "by_ms", "error", "said"),
    [
        ("", "cancel", "true", 0, UsageError, "the id of a job is ''"),
        ("a/b", "cancel", "true", 0, UsageError, "the id of a job is 'a/b'"),
        ("x" * 129, "cancel", "true", 0, UsageError, "expected up to 128"),
        ("job", "delete", "true", 0, UsageError, "a job is 'delete'"),
        ("job", "cancel", "  ", 0, UsageError, "a predicate has 2 characters"),
        ("job", "cancel", "x" * 16_385, 0, UsageError, "a predicate has 16385 characters"),
        ("job", "postpone", "true", 0, UsageError, "messages are postponed by 0 ms"),
        ("job", "postpone", "true", SMALL.delay_ms_max + 1, UsageError, "expected 1 to delay_ms_max"),
        ("known", "postpone", "true", 1, Refused, "it is another kind of job"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(
    data: Data, job_id: str, op: str, where: str, by_ms: int, error: type[PostdateError], said: str
) -> None:
    broker = data.open()
    ask(broker, "known")
    end = broker.log.end
    with pytest.raises(error, match=said):
        broker.jobs.ask(job_id, op, where, by_ms, T0)
    assert broker.log.end == end, "nothing is written"


def test_an_import_needs_a_topic_that_exists(data: Data) -> None:
    with pytest.raises(TopicNotFound):
        data.open().jobs.begin("import", "nowhere", T0)


def test_only_so_many_jobs_are_open(data: Data) -> None:
    broker = data.open()
    for number in range(OPEN_MAX):
        ask(broker, f"job-{number}")
    with pytest.raises(FlowControl, match=f"{OPEN_MAX} jobs are not over yet"):
        ask(broker, "one-more")
    assert ask(broker, "job-0").number == 0, "one that is known is no new one"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (["_import-1.parquet", 100], "a file is"),
        (["_import-1.parquet", 100, 10, T0, T0, 1, -2], "a file is"),
        (["part-1.parquet", *FILE[1:]], "a file is named"),
        (["_import-../x.parquet", *FILE[1:]], "a file is named"),
    ],
)
def test_a_file_that_an_import_cannot_have_is_refused(data: Data, file: list[object], said: str) -> None:
    broker = data.open()
    settled(broker, broker.jobs.begin("import", TOPIC, T0))
    with pytest.raises(UsageError, match=said):
        broker.jobs.adopt("import", [file], 0, T0)


def test_a_job_that_nobody_knows_is_named(data: Data) -> None:
    broker = data.open()
    with pytest.raises(UsageError, match="there is no job 'nobody'"):
        broker.jobs.fail("nobody", "", T0)


# -- deciding ----------------------------------------------------------------------------------------------------


def test_a_decision_takes_a_message_that_waits(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS))
    decided = decide(broker, select(data, broker, ask(broker)))
    assert (decided.state, decided.changed, decided.late) == (RUNNING, 1, 0)


def test_a_decision_of_an_older_pipeline_is_refused(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS))
    selected = select(data, broker, ask(broker))
    registered(broker)
    with pytest.raises(Refused, match="another pipeline has registered"):
        broker.jobs.check(selected)


def test_a_decision_is_taken_once(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS))
    selected = select(data, broker, ask(broker))
    parts = broker.jobs.verify(selected)
    settled(broker, broker.jobs.decide(selected, parts, T0))
    with pytest.raises(Refused, match="does not wait for a decision: it is running"):
        broker.jobs.decide(selected, parts, T0)


def test_a_selection_for_a_queue_that_never_existed_is_corrupt(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS))
    selected = select(data, broker, ask(broker), queue=10_000)
    with pytest.raises(CorruptSelection, match="a queue that never existed"):
        broker.jobs.verify(selected)


def test_a_cancel_waits_for_a_decision_that_is_written(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS, unique="K"))
    selected = select(data, broker, ask(broker))
    ticket = broker.jobs.decide(selected, broker.jobs.verify(selected), T0)
    assert broker.jobs.is_deciding
    broker.cancel(TOPIC, "K", T0 + DAY_MS, T0)
    assert ticket.answers is not None, "the decision is applied first"
    assert not broker.jobs.is_deciding


def test_a_job_that_the_view_gives_away_is_a_copy(data: Data) -> None:
    broker = data.open()
    number = ask(broker).number
    copy = broker.view.job(number)
    assert copy is not None
    copy.state = DONE
    assert [job.state for job in broker.view.jobs()] == [WAITING]
    assert dataclasses.replace(copy, state=WAITING) == broker.view.find_job("job")
