"""Promotion by bulk, where no pipeline does it in time. The broker's clock is moved by hand; Spark takes no part."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postdate.check import check_folder
from postdate.client.errors import TimedOut
from postdate.contract import DONE, FAILED, RUNNING, JobOrder, Selection, Stage
from postdate.errors import PostdateError
from postdate.storage.disk import RealDisk
from postdate.table.find import TableUnreadable
from postdate.table.slices import Limits
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS
from tests.support.pipeline import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert report.ok, report.findings


def dues(world: World, count: int = 20, first_ms: int = 3 * MINUTE_MS, step_ms: int = 7 * SECOND_MS) -> list[int]:
    return [world.clock.now_ms() + first_ms + n * step_ms for n in range(count)]


def expect_on_time(world: World, name: str, expected: list[int]) -> None:
    shown = {body: at for body, at in world.shown().items() if body.startswith(name)}
    assert shown == {f"{name} {n}": due for n, due in enumerate(expected)}


def pass_with_pipeline(world: World, minutes: int) -> None:
    """A batch at each minute, and a look of bulk each second."""
    for _ in range(minutes):
        world.pass_without_pipeline(MINUTE_MS)
        world.batch()


def promotions(world: World) -> dict[str, object]:
    return world.served.call(world.served.dispatcher.sessions.table.promotions)


def test_imported_messages_are_on_time_while_the_pipeline_is_away(world: World) -> None:
    wanted = dues(world)
    world.import_messages("nightly", wanted)
    world.batch()
    assert world.control.find_job("nightly").state == DONE
    world.pass_without_pipeline(7 * MINUTE_MS)
    expect_on_time(world, "nightly", wanted)
    assert promotions(world)["bulk_promoted"] == len(wanted)
    assert promotions(world)["bulk_since_ms"]
    world.pass_minutes(1)
    assert not promotions(world)["bulk_since_ms"]


def test_sent_messages_that_were_taken_come_once_from_log_or_table(world: World) -> None:
    wanted = dues(world)
    world.send("sent", wanted)
    world.batch()
    world.pass_without_pipeline(7 * MINUTE_MS)
    expect_on_time(world, "sent", wanted)
    world.pass_minutes(2)
    expect_on_time(world, "sent", wanted)


def test_bulk_promotes_nothing_beside_a_pipeline_that_is_in_time(world: World) -> None:
    wanted = dues(world)
    world.import_messages("nightly", wanted)
    world.batch()
    pass_with_pipeline(world, 6)
    expect_on_time(world, "nightly", wanted)
    assert promotions(world) == {
        "bulk_attached": True, "bulk_promoted": 0, "bulk_since_ms": 0, "bulk_problem": "", "bulk_problem_since_ms": 0,
    }  # fmt: skip


def test_a_pipeline_that_comes_back_promotes_the_rest_and_nothing_twice(world: World) -> None:
    wanted = dues(world, 60)
    world.import_messages("nightly", wanted)
    world.batch()
    world.pass_without_pipeline(5 * MINUTE_MS)
    world.pipeline = world.registered()
    pass_with_pipeline(world, 7)
    expect_on_time(world, "nightly", wanted)
    state = world.control.state()
    assert state.rows_in - state.rows_out == 0


def test_cancels_in_the_table_and_at_the_broker_hold(world: World) -> None:
    wanted = dues(world)
    world.import_messages("nightly", wanted)
    world.cancel("nightly-u3", wanted[3], "unique")
    world.batch()  # the table has this cancel
    world.cancel("nightly-u5", wanted[5], "unique")
    world.pass_without_pipeline(7 * MINUTE_MS)
    assert world.shown().keys() == {f"nightly {n}" for n in range(20)} - {"nightly 3", "nightly 5"}


def test_rows_of_an_import_that_no_batch_has_taken_in_come_from_where_they_lie(world: World) -> None:
    wanted = dues(world)
    world.batch()
    world.import_messages("nightly", wanted)
    world.pass_without_pipeline(4 * MINUTE_MS)
    expect_on_time(world, "nightly", [due for due in wanted if due <= world.clock.now_ms()])
    assert world.control.find_job("nightly").state == RUNNING
    assert world.control.fail_job("nightly", "withdrawn").state == RUNNING
    world.pipeline = world.registered()
    world.batch()
    assert world.control.find_job("nightly").state == DONE
    pass_with_pipeline(world, 5)
    expect_on_time(world, "nightly", wanted)


def test_an_import_before_the_first_batch_of_a_pipeline_is_served(world: World) -> None:
    wanted = dues(world, 5, first_ms=2 * SECOND_MS, step_ms=SECOND_MS)
    world.import_messages("nightly", wanted)
    world.pass_without_pipeline(10 * SECOND_MS)
    expect_on_time(world, "nightly", wanted)


def test_overdue_rows_of_an_import_come_at_once(world: World) -> None:
    world.batch()
    wanted = [world.clock.now_ms() - HOUR_MS + n for n in range(5)]
    world.import_messages("nightly", wanted)
    world.pass_without_pipeline(SECOND_MS)
    assert world.shown().keys() == {f"nightly {n}" for n in range(5)}
    world.batch()
    assert len(world.shown()) == 5


def test_a_healthy_pipeline_takes_an_import_in_before_bulk_brings_it(world: World) -> None:
    world.batch()
    wanted = dues(world, first_ms=20 * SECOND_MS, step_ms=SECOND_MS)
    world.import_messages("nightly", wanted)
    world.bulk.promoter.look()
    world.batch()
    world.bulk.promoter.look()
    pass_with_pipeline(world, 1)
    expect_on_time(world, "nightly", wanted)
    assert promotions(world)["bulk_promoted"] == 0


def test_a_withdrawn_import_brings_nothing(world: World) -> None:
    world.batch()
    world.import_messages("nightly", dues(world))
    assert world.control.fail_job("nightly", "withdrawn").state == FAILED
    world.pass_without_pipeline(7 * MINUTE_MS)
    assert world.shown() == {}


def test_rows_come_from_a_file_that_a_batch_has_renamed_and_not_taken_in(world: World) -> None:
    wanted = dues(world)
    world.batch()
    files = world.write_import("nightly", wanted)
    world.control.adopt("nightly", files, 0)
    (_, far), *_ = world.control.state().commands
    world.pipeline._jobs._move_in(files[0], far)
    world.pass_without_pipeline(7 * MINUTE_MS)
    expect_on_time(world, "nightly", wanted)
    world.pipeline = world.registered()
    world.batch()
    expect_on_time(world, "nightly", wanted)


def test_a_cancel_holds_for_rows_that_come_from_where_they_lie(world: World) -> None:
    wanted = dues(world)
    world.batch()
    files = world.write_import("nightly", wanted)
    world.cancel("nightly-u1", wanted[1], "unique")  # after the import began, before its command
    world.batch()  # the table carries it
    world.control.adopt("nightly", files, 0)
    world.cancel("nightly-u3", wanted[3], "unique")
    world.pass_without_pipeline(3 * MINUTE_MS)
    world.cancel("nightly-u5", wanted[5], "unique")  # it is in the wheel
    world.pass_without_pipeline(4 * MINUTE_MS)
    left = {f"nightly {n}" for n in range(20)} - {"nightly 1", "nightly 3", "nightly 5"}
    assert world.shown().keys() == left
    world.pipeline = world.registered()
    world.batch()
    world.pass_minutes(2)
    assert world.shown().keys() == left


def test_postponed_messages_come_from_where_they_lie_but_for_those_that_came_too_late(world: World) -> None:
    wanted = dues(world, 6, first_ms=3 * MINUTE_MS, step_ms=SECOND_MS)
    world.send("sent", wanted)
    world.batch()
    world.cancel("sent-u1", wanted[1], "unique")
    world.decide_postponement("later", 2 * MINUTE_MS)
    status = world.control.find_job("later")
    assert (status.state, status.rows, status.late) == (RUNNING, 6, 1)
    world.pass_without_pipeline(6 * MINUTE_MS)
    moved = {f"sent {n}": due + 2 * MINUTE_MS for n, due in enumerate(wanted) if n != 1}
    assert world.shown() == moved
    assert world.control.find_job("later").state == RUNNING
    world.pipeline = world.registered()
    world.batch()
    assert world.control.find_job("later").state == DONE
    world.pass_minutes(2)
    assert world.shown() == moved


def test_a_lookup_finds_a_brought_message_once_wherever_it_is(world: World) -> None:
    wanted = dues(world, 2)
    world.batch()
    world.import_messages("nightly", wanted)
    world.pass_without_pipeline(2 * MINUTE_MS)
    assert world.find_states("nightly-u0") == ["waiting"]
    world.pass_without_pipeline(2 * MINUTE_MS)
    assert world.find_states("nightly-u0") == ["visible"]
    world.pipeline = world.registered()
    world.batch()
    assert world.control.find_job("nightly").state == DONE
    assert world.find_states("nightly-u0") == ["visible"]


def test_a_batch_whose_stage_bulk_has_overtaken_promotes_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dues(world, 60)
    world.import_messages("nightly", wanted)
    world.batch()
    world.send("sent", wanted)
    world.served.pass_ms(3 * MINUTE_MS - SECOND_MS)
    stage, calls = world.control.stage, []

    def stage_late(asked: Stage) -> None:
        """Bulk comes first; then the clock has gone on, so that there is a rest."""
        calls.append(asked)
        if len(calls) == 1:
            world.bulk.promoter.look()
        stage(asked)

    monkeypatch.setattr(world.control, "stage", stage_late)
    world.batch()
    assert [asked.horizon[0] < asked.horizon[1] for asked in calls] == [True, False]
    monkeypatch.undo()
    pass_with_pipeline(world, 8)
    for name in ("nightly", "sent"):
        expect_on_time(world, name, wanted)
    state = world.control.state()
    assert state.rows_in == state.rows_out


def test_an_import_that_bulk_brings_while_a_batch_takes_it_in_is_taken_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.batch()
    wanted = dues(world, 3, first_ms=SECOND_MS, step_ms=SECOND_MS)
    world.import_messages("nightly", wanted)
    decide = world.control.decide

    def decide_late(selection: Selection) -> JobOrder:
        world.bulk.promoter.look()
        return decide(selection)

    monkeypatch.setattr(world.control, "decide", decide_late)
    world.batch()
    assert world.control.find_job("nightly").state == DONE
    pass_with_pipeline(world, 1)
    expect_on_time(world, "nightly", wanted)
    assert promotions(world)["bulk_promoted"] == 3


def test_the_chunks_of_a_refused_stage_are_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.import_messages("nightly", dues(world))
    world.batch()
    world.served.pass_ms(2 * MINUTE_MS)
    stage = world.bulk._link.stage
    monkeypatch.setattr(world.bulk._link, "stage", lambda asked: stage(asked._replace(epoch=asked.epoch - 1)))
    world.bulk.promoter.look()
    assert list((world.folder / "chunks").iterdir()) == []
    monkeypatch.undo()
    world.pass_without_pipeline(6 * MINUTE_MS)
    assert len(world.shown()) == 20


def test_a_table_that_cannot_be_read_is_told_and_promoted_when_it_can(world: World) -> None:
    wanted = dues(world)
    world.import_messages("nightly", wanted)
    world.batch()
    table = world.folder / "table"
    table.rename(world.folder / "away")
    world.pass_without_pipeline(4 * MINUTE_MS)
    assert world.shown() == {}
    told = promotions(world)
    assert "table" in str(told["bulk_problem"])
    assert told["bulk_problem_since_ms"]
    (world.folder / "away").rename(table)
    world.pass_without_pipeline(5 * MINUTE_MS)
    assert len(world.shown()) == 20
    assert promotions(world)["bulk_problem"] == ""


def test_a_damaged_file_is_told_by_its_name(world: World) -> None:
    world.import_messages("nightly", dues(world))
    world.batch()
    (path,) = (world.folder / "table" / "messages").glob("soon-*.parquet")
    content = path.read_bytes()
    path.write_bytes(content[:100])
    world.pass_without_pipeline(3 * MINUTE_MS)
    assert path.name in str(promotions(world)["bulk_problem"])
    path.write_bytes(content)
    world.pass_without_pipeline(5 * MINUTE_MS)
    assert len(world.shown()) == 20


def test_a_stage_of_bulk_that_a_pipeline_overtakes_is_refused(world: World) -> None:
    world.import_messages("nightly", dues(world))
    world.batch()
    world.served.pass_ms(2 * MINUTE_MS)
    old = world.control.state()
    world.pipeline = world.registered()
    with pytest.raises(PostdateError, match="another pipeline has registered"):
        world.bulk.promoter._promote_table(old, old.now_ms + MINUTE_MS)


def test_large_windows_are_staged_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.bulk.promoting._LIMITS", Limits(rows=50))
    wanted = dues(world, 300, step_ms=100)
    world.import_messages("nightly", wanted)
    world.batch()
    world.pass_without_pipeline(7 * MINUTE_MS, 10 * SECOND_MS)
    assert len(world.shown()) == 300


def test_the_broker_logs_when_bulk_begins_and_ends_to_stand_in(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "postdate.server")
    world.import_messages("nightly", dues(world))
    world.batch()
    world.pass_without_pipeline(4 * MINUTE_MS)
    world.batch()
    said = [record.message for record in caplog.records if "promote" in record.message]
    assert said == ["no pipeline promotes in time: bulk promotes in its place", "a pipeline promotes again"]


def test_a_problem_is_logged_once_and_so_is_its_end(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.import_messages("nightly", dues(world))
    world.batch()
    table = world.folder / "table"
    table.rename(world.folder / "away")
    world.pass_without_pipeline(3 * MINUTE_MS)
    (world.folder / "away").rename(table)
    world.pass_without_pipeline(MINUTE_MS)
    said = [record.message for record in caplog.records if "can" in record.message and "promote" in record.message]
    assert len(said) == 2, said
    assert said[0].startswith("nobody promotes what falls due in the table")
    assert said[1] == "what falls due in the table can be promoted again"


def test_a_table_of_another_broker_is_not_promoted(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = World(tmp_path_factory.mktemp("other"))
    other.import_messages("theirs", dues(other))
    other.batch()
    other.close()
    world.import_messages("nightly", dues(world))
    world.batch()
    own = world.folder / "table"
    own.rename(world.folder / "away")
    (other.folder / "table").rename(own)
    world.pass_without_pipeline(4 * MINUTE_MS)
    assert world.shown() == {}
    assert "belongs to" in str(promotions(world)["bulk_problem"])
    own.rename(other.folder / "table")
    (world.folder / "away").rename(own)
    world.pass_without_pipeline(4 * MINUTE_MS)
    assert len(world.shown()) == 20


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"taken": 1_000}, "ends at far row"),
        ({"epoch": 0}, "knows more than the broker's log"),
        ({"horizon": 0}, "knows more than the broker's log"),
        ({"far_length": 0}, "knows more than the broker's log"),
    ],
)
def test_a_table_that_does_not_fit_the_log_is_not_promoted(
    world: World, changed: dict[str, int], sentence: str
) -> None:
    world.import_messages("nightly", dues(world))
    world.batch()
    world.pass_minutes(4)  # something is promoted
    state = world.control.state()
    assert world.bulk.promoter._open_table(state).files
    with pytest.raises(TableUnreadable, match=sentence):
        world.bulk.promoter._open_table(state._replace(**changed))  # type: ignore[arg-type]


def test_the_chunks_of_a_stage_without_an_answer_are_removed_when_it_did_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dues(world)
    world.import_messages("nightly", wanted)
    world.batch()
    world.served.pass_ms(2 * MINUTE_MS)

    def lose(_: Stage) -> None:
        raise TimedOut("no answer")

    monkeypatch.setattr(world.bulk._link, "stage", lose)
    with pytest.raises(TimedOut):
        world.bulk.promoter.look()
    (lost,) = (world.folder / "chunks").iterdir()
    monkeypatch.undo()
    world.pass_without_pipeline(6 * MINUTE_MS)
    assert not lost.exists()
    assert len(world.shown()) == 20
