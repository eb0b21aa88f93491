"""The pipeline on real Spark and a manual clock: every delay arrives on its millisecond, whatever happens to it."""

import random
from pathlib import Path
from typing import Any

from postdate.table import merging
from tests.support.spark import DAY_MS, HOUR_MS, MINUTE_MS, NOW, SECOND_MS, TOPIC, Piped, Sent, Steps, piping

DUE = NOW + 10 * MINUTE_MS
YEAR_MS = 365 * DAY_MS


def test_every_kind_of_delay_arrives_on_its_millisecond(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.start_driver()
        piped.send(NOW + 5 * SECOND_MS, DELAY="2")
        piped.send(NOW + 2 * MINUTE_MS, DELAY="6")
        piped.send(NOW + 2 * HOUR_MS, DELAY="18")
        piped.send(NOW + 90 * SECOND_MS, TIMER_DELAY_SEC="90")
        piped.send(NOW + 3 * HOUR_MS + 1, TIMER_DELAY_MS=str(3 * HOUR_MS + 1))
        piped.send(NOW + DAY_MS + 1, NOW + 40 * DAY_MS + 77, NOW + 300 * DAY_MS + 999)
        piped.send(*(DUE + n * 977 for n in range(100)))
        piped.finish()
        assert not piped.running.pipeline.table.files


def test_a_year_passes_with_merges_into_hours_and_months(tmp_path: Path, spark: Any) -> None:
    """Messages due in some minutes of a year, sent before and on the way; at the end nothing is left of them."""
    dice = random.Random(6)
    days = (1, 20, 45, 46, 364)
    bases = [NOW // MINUTE_MS * MINUTE_MS + day * DAY_MS + dice.randrange(0, DAY_MS, MINUTE_MS) for day in days]
    with piping(tmp_path, spark) as piped:
        piped.merge_limits = merging.Limits(soon_files=2, later_files=3)
        piped.start_driver()

        def send(count: int, minutes: list[int]) -> None:
            if minutes:
                piped.send(*(dice.choice(minutes) + dice.randrange(MINUTE_MS) for _ in range(count)))

        send(200, bases)
        for number, base in enumerate(bases):
            piped.travel(base + MINUTE_MS)
            for _ in range(2):
                send(10, bases[number + 1 :])
                send(5, [base + 7 * MINUTE_MS])
                piped.pass_ms(MINUTE_MS)
            piped.travel(base + 8 * MINUTE_MS)
        piped.finish()
        table = piped.running.pipeline.table
        assert not table.files
        _judge_writes(piped.reports(), len(piped.sent))
        table.remove_old_files(retention_hours=0)
        assert not list((piped.table / "messages").glob("*.parquet"))


def _judge_writes(reports: list[dict[str, Any]], row_count: int) -> None:
    rows, merged, promoted = (
        sum(report[name] for report in reports) for name in ("rows_in", "merged_rows", "promoted")
    )
    assert rows == promoted == row_count
    assert 0 < merged <= 2 * rows, "a row is written three times at most"
    assert max(report["opened_files"] for report in reports) <= 30


def test_rows_that_a_bounded_batch_leaves_behind_the_horizon_are_promoted_late_and_in_time(
    tmp_path: Path, spark: Any
) -> None:
    with piping(tmp_path, spark, batch_rows=40, soon_rows=40) as piped:
        piped.send(*(NOW + 65 * SECOND_MS + n * 100 for n in range(300)))
        piped.start_driver()
        piped.follow()
        piped.wait(lambda: piped.far.taken == 300)
        piped.rest()
        reports = piped.reports()
        assert [report["rows_in"] for report in reports] == [40] * 7 + [20]
        assert sum(report["promoted"] for report in reports[1:]) > 40
        piped.finish()


def test_a_burst_at_one_instant_is_split_over_tasks(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark, task_rows=60) as piped:
        piped.send(*[DUE] * 500)
        piped.start_driver()
        piped.finish()
        assert max(report["chunks"] for report in piped.reports()) >= 500 // 60


# -- cancels ----------------------------------------------------------------------------------------------------


def test_a_cancel_reaches_its_message_wherever_it_is(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        for number in range(8):
            piped.send(DUE, key=f"k{number}")
        untaken, in_table, promoted, fired = (piped.sent[n : n + 2] for n in (0, 2, 4, 6))
        assert _cancelled(piped, untaken) == ["cancelled"] * 2
        piped.start_driver()
        piped.follow()
        assert piped.far.taken == piped.far.length
        assert _cancelled(piped, in_table) == ["cancelled"] * 2
        piped.travel(DUE - MINUTE_MS)
        assert sum(piped.broker.fold.near) == 4, "the chunk came without those that were cancelled before"
        assert _cancelled(piped, promoted) == ["cancelled"] * 2
        missing = Sent("", TOPIC, 0, DUE + HOUR_MS, "never sent", "never sent")
        assert _cancelled(piped, [missing, missing]) == ["unknown"] * 2
        piped.finish()
        assert _cancelled(piped, fired) == ["delivered"] * 2


def _cancelled(piped: Piped, two: list[Sent]) -> list[str]:
    """Cancels one by each kind of key."""
    return [piped.cancel(sent, by=by) for sent, by in zip(two, ("unique", "key"), strict=True)]


def test_a_key_can_be_used_again_after_a_cancel(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        for number in range(4):
            piped.send(DUE, key=f"k{number}")
        piped.start_driver()
        old = list(piped.sent)
        for number, by in ((0, "unique"), (2, "key")):
            assert piped.cancel(old[number], by=by) == "cancelled"
        again = [piped.send(DUE, unique=old[0].unique)[0], piped.send(DUE, key=old[2].key)[0]]
        piped.follow()
        for number, by in ((1, "unique"), (3, "key")):
            assert piped.cancel(old[number], by=by) == "cancelled"
        again += [piped.send(DUE, unique=old[1].unique)[0], piped.send(DUE, key=old[3].key)[0]]
        piped.finish()
        assert piped.never == {sent.body for sent in old}
        shown = {each.body for queue in piped.shown().values() for each in queue}
        assert shown == {sent.body for sent in again}


def test_a_cancel_takes_every_copy_that_a_resend_left(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        (first,) = piped.send(DUE, unique="twice")
        (kept,) = piped.send(DUE, unique="both are shown")
        piped.start_driver()
        piped.follow()  # the first copy is in the table, the second in the far queue
        piped.send(DUE, unique="twice", body=first.body, queue_id=first.queue_id)
        piped.send(DUE, unique="both are shown", body=kept.body, queue_id=kept.queue_id)
        assert piped.cancel(first) == "cancelled"
        piped.finish()


def test_a_cancel_that_races_any_step_of_a_batch_is_kept(tmp_path: Path, spark: Any) -> None:
    """Two cancels at each step of two batches, for messages that the batch takes in and for such that it promotes."""
    steps = (
        "batch.begun", "ingest.written", "table.commit", "table.committed", "table.synced", "stage.call",
        "stage.called", "merge.written", "merge.committed", "batch.done",
    )  # fmt: skip

    class Race(Steps):
        def __init__(self) -> None:
            self.left: list[Sent] = []
            self.outcomes: dict[str, list[str]] = {}

        def __call__(self, name: str) -> None:
            if name not in self.outcomes and len(self.left) > 1:
                two, self.left = self.left[:2], self.left[2:]
                self.outcomes[name] = _cancelled(piped, two)

    with piping(tmp_path, spark) as piped, Race().planted() as race:
        piped.merge_limits = merging.Limits(soon_files=1)
        piped.start_driver()
        piped.follow()
        for number in range(80):
            piped.send(DUE, key=f"k{number}")
        race.left, race.outcomes = piped.sent[:20], {}  # while they are taken in
        piped.pass_ms(MINUTE_MS)
        assert sorted(race.outcomes) == sorted(steps)
        assert {outcome for two in race.outcomes.values() for outcome in two} == {"cancelled"}
        piped.travel(DUE - 2 * MINUTE_MS - 10 * SECOND_MS)
        race.left, race.outcomes = piped.sent[20:40], {}  # while they are promoted
        piped.pass_ms(MINUTE_MS)
        assert race.outcomes.keys() >= {"batch.begun", "stage.call", "stage.called", "batch.done"}
        assert {outcome for two in race.outcomes.values() for outcome in two} == {"cancelled"}
        race.left = []
        piped.finish()


# -- topics -----------------------------------------------------------------------------------------------------


def test_messages_of_a_deleted_topic_never_come_back(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.make_topic("gone", 2)
        piped.send(DUE, DUE + 5 * MINUTE_MS, topic="gone", queue_id=1)
        piped.send(DUE, DUE + 5 * MINUTE_MS)
        piped.start_driver()
        piped.travel(DUE - MINUTE_MS)  # one is in the wheel, one in the table
        served = piped.served
        assert served is not None
        served.call(lambda: served.broker.delete_topic("gone", piped.now))
        piped.never |= {sent.body for sent in piped.sent if sent.topic == "gone"}
        piped.make_topic("gone", 2)
        piped.send(DUE + 5 * MINUTE_MS, topic="gone", queue_id=1)
        piped.finish()


def test_a_message_for_a_queue_that_was_taken_away_goes_to_another(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        for queue_id in range(4):
            piped.send(DUE, queue_id=queue_id)
        piped.start_driver()
        piped.follow()
        piped.make_topic(TOPIC, 3)
        piped.finish()
        found = {queue_id: len(queue) for queue_id, queue in piped.shown().items()}
        assert found == {0: 2, 1: 1, 2: 1, 3: 0}


def test_an_idle_pipeline_runs_a_batch_only_when_a_minute_turns(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.start_driver()
        piped.follow()
        for _ in range(3):
            piped.send(DUE)
        piped.move(piped.now + 10 * SECOND_MS)
        before = len(piped.reports())
        piped.pass_ms(MINUTE_MS)
        assert len(piped.reports()) == before + 1
        assert piped.reports()[-1]["rows_in"] == 3
        piped.finish()
