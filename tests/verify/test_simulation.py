"""The simulation: planted races, random histories, a model that notices each kind of mistake, digests, the command."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from postdate.arrival import own_arrival
from postdate.broker.broker import Broker
from postdate.broker.cancelling import CancelCalls
from postdate.broker.rescuing import Rescuer
from postdate.broker.sending import SendCalls
from postdate.broker.transactions import OpenHalf, TransactionCalls
from postdate.errors import CorruptLog
from postdate.message import Cancelled, Ended
from postdate.state.fold import Fold
from postdate.state.moves import Moves
from postdate.state.once import Once
from postdate.state.transactions import Half, Transactions
from postdate.storage.batch import Batch
from verify import simulation
from verify.simulation import Broken, Failure, Model, Op, VirtualDisk, World, random_history, run_history, run_seed
from verify.simulation import __main__ as command
from verify.simulation import history as histories
from verify.simulation import pipeline as pipelines
from verify.simulation.digest import Digest
from verify.simulation.history import digest_seed
from verify.simulation.model import Asked, Sent
from verify.simulation.oncers import Oncers
from verify.simulation.pipeline import SimulatedPipeline, SimulatedTable, TableRow
from verify.simulation.planted import PLANTED, Planted, digest_planted, run_planted

ROOT = Path(__file__).parents[2]
POWER_SEEDS = range(12)
SEEDS, SEEDS_PER_TEST = 210, 30  # 2,000 more in scripts/full
T0 = 1_000_000


# ------------------------------------------------------------------------------------------------ planted histories


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_history_holds_after_any_power_loss(planted: Planted) -> None:
    has_power = any(op.verb == "power" for op in planted.history)
    for seed in POWER_SEEDS if has_power else [0]:
        run_planted(planted, seed)


def test_the_disk_decides_between_an_unflushed_cancel_and_a_fire_after_it() -> None:
    (planted,) = [planted for planted in PLANTED if planted.name == "an unflushed cancel before a fire"]
    seen = {run_planted(planted, seed).model.messages["m1"].seen_at is not None for seed in POWER_SEEDS}
    assert seen == {True, False}, "the dice must show both: a cancel that survived and one that did not"


def test_a_planted_history_with_another_end_is_broken() -> None:
    delivered = (Op("send", (3, 1_000, 0, 0, 1)), Op("flush"), Op("pass", (2_000,)))
    run_planted(Planted("right", delivered, seen=("m1",)))
    with pytest.raises(Broken, match="wrong: m1 was seen"):
        run_planted(Planted("wrong", delivered, unseen=("m1",)))
    cancelled = (*delivered[:2], Op("cancel", (0, 0)), Op("flush"), Op("pass", (2_000,)))
    with pytest.raises(Broken, match="wrong: m1 was not seen"):
        run_planted(Planted("wrong", cancelled, seen=("m1",)))


# ------------------------------------------------------------------------------------------------- random histories


@pytest.mark.parametrize("start", range(0, SEEDS, SEEDS_PER_TEST))
def test_random_histories_hold(start: int) -> None:
    failures = [failure for seed in range(start, start + SEEDS_PER_TEST) if (failure := run_seed(seed)) is not None]
    assert not failures, "\n\n".join(map(str, failures))


def test_a_seed_gives_the_same_history_each_time_and_another_seed_another() -> None:
    assert random_history(7) == random_history(7)
    assert random_history(7) != random_history(8)


def test_random_histories_use_every_verb() -> None:
    assert {op.verb for seed in range(200) for op in random_history(seed)} == set(World().verbs)


def test_a_failing_history_is_shortened_to_the_ops_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [Op("flush")] * 40
    history[11:11] = [Op("kill", (1,))]
    history[30:30] = [Op("power", (2,))]

    def run(ops: list[Op], _seed: int) -> None:
        if Op("kill", (1,)) in ops and Op("power", (2,)) in ops:
            raise Broken("both")
        if Op("kill", (1,)) in ops:
            raise CorruptLog("another failure is not the one we look for")

    monkeypatch.setattr(histories, "random_history", lambda _seed: history)
    monkeypatch.setattr(histories, "run_history", run)
    failure = run_seed(4_711)
    assert failure is not None
    assert failure.history == [Op("kill", (1,)), Op("power", (2,))]
    assert str(failure) == "seed 4711: Broken: both\nshortest history found:\n  kill(1)\n  power(2)"


def test_a_history_that_breaks_a_promise_fails_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end: the world and its model notice a broker that fires early."""
    history = [Op("send", (3, 1_000, 0, 0, 1)), Op("flush")]
    run_history(history)
    fire = World.flush

    def fire_early(self: World) -> None:
        assert self.broker is not None
        self.broker.advance(self.clock.now_ms() + 1_000)
        fire(self)

    monkeypatch.setattr(World, "flush", fire_early)
    with pytest.raises(Broken, match=r"m1 is due at \d+ and was seen when no clock had passed"):
        run_history(history)


# ------------------------------------------------------------------------------------- the model notices what is wrong


def sent(model: Model, name: str, due: int = 0, *, arrival: int = 0, near: bool = True) -> Sent:
    """Adds an acknowledged message; its keys are made from its name."""
    message = Sent(name, "orders", 0, f"u{name}", f"k{name}", due, T0, near, arrival, acknowledged=True)
    model.add(message)
    return message


def asked(name: str, due: int, *, arrival: int = 1_000, by: str = "unique") -> Asked:
    return Asked("orders", f"u{name}" if by == "unique" else f"k{name}", by, due, arrival)


@pytest.fixture
def model() -> Model:
    return Model(clock_max=T0)


def test_right_behaviour_passes(model: Model) -> None:
    sent(model, "a", T0 - 10, arrival=10)
    sent(model, "b", T0, arrival=5)
    sent(model, "c", T0 + 1)
    model.look(0, 0, ["a", "b"], 100)
    model.look(0, 0, ["a", "b"], 100)
    model.look(0, 1, ["b"], 100)
    model.check_length(0, 2)
    model.check_complete(T0, frozenset())


def test_a_duplicate_is_noticed(model: Model) -> None:
    sent(model, "a")
    model.look(0, 0, ["a"], 0)
    with pytest.raises(Broken, match=r"a is at \(0, 0\) and again in queue 0, offset 1"):
        model.look(0, 0, ["a", "a"], 0)
    with pytest.raises(Broken, match="again in queue 1, offset 0"):
        model.look(1, 0, ["a"], 0)


def test_a_message_that_comes_early_is_noticed(model: Model) -> None:
    sent(model, "a", T0 + 1)
    with pytest.raises(Broken, match=f"a is due at {T0 + 1} and was seen when no clock had passed {T0}"):
        model.look(0, 0, ["a"], 0)


def test_a_cancelled_message_that_comes_is_noticed(model: Model) -> None:
    sent(model, "a", T0)
    model.check_answer(asked("a", T0), Cancelled.CANCELLED, in_table=frozenset())
    with pytest.raises(Broken, match="a was cancelled and is in queue 0, offset 0"):
        model.look(0, 0, ["a"], 0)


def test_a_message_of_a_deleted_topic_that_comes_is_noticed(model: Model) -> None:
    sent(model, "a", T0)
    model.note_topic_deleted("orders")
    with pytest.raises(Broken, match="a was cancelled"):
        model.look(0, 0, ["a"], 0)


@pytest.mark.parametrize(("second_due", "second_arrival"), [(T0 - 1, 20), (T0, 9)])
def test_a_wrong_order_is_noticed(model: Model, second_due: int, second_arrival: int) -> None:
    sent(model, "a", T0, arrival=10)
    sent(model, "b", second_due, arrival=second_arrival)
    model.look(0, 0, ["a"], 100)
    with pytest.raises(Broken, match=f"b, due {second_due}, comes after a, due {T0}"):
        model.look(0, 1, ["b"], 100)


@pytest.mark.parametrize("second", [{"arrival": 100}, {"arrival": 5, "near": False}])
def test_a_message_that_was_not_in_the_wheel_when_another_fired_may_come_after_it(
    model: Model, second: dict[str, int]
) -> None:
    sent(model, "a", T0, arrival=10)
    sent(model, "b", T0 - 1, arrival=second["arrival"], near=bool(second.get("near", True)))
    model.look(0, 0, ["a", "b"], 100)


def test_an_offset_that_changes_is_noticed(model: Model) -> None:
    sent(model, "a")
    sent(model, "b")
    model.look(0, 0, ["a", "b"], 0)
    with pytest.raises(Broken, match="queue 0, offset 0: was a, is b now"):
        model.look(0, 0, ["b", "a"], 0)


def test_a_lost_entry_is_noticed(model: Model) -> None:
    sent(model, "a")
    model.look(0, 0, ["a"], 0)
    model.check_length(0, 1)
    model.check_length(9, 0)
    with pytest.raises(Broken, match="queue 0 had 1 entries and has 0 now"):
        model.check_length(0, 0)


def test_a_message_that_was_never_sent_is_noticed(model: Model) -> None:
    with pytest.raises(Broken, match="x was never sent"):
        model.look(0, 0, ["x"], 0)
    sent(model, "lost").exists = False
    with pytest.raises(Broken, match="lost was never sent"):
        model.look(0, 0, ["lost"], 0)


def test_a_message_that_is_missing_is_noticed(model: Model) -> None:
    message = sent(model, "a", T0)
    model.check_complete(T0 - 1, frozenset())
    model.check_complete(T0, frozenset({"a"}))
    with pytest.raises(Broken, match=f"a was due at {T0}, everything due by {T0} is fired, it is not seen"):
        model.check_complete(T0, frozenset())
    message.acknowledged = False
    model.check_complete(T0, frozenset())


Given = Callable[[Model], object]


@pytest.mark.parametrize(
    ("given", "answer", "said"),
    [
        (lambda _: None, Cancelled.CANCELLED, "answered 'cancelled', but there is no such message"),
        (lambda model: model.look(0, 0, ["a"], 0), Cancelled.CANCELLED, "answered 'cancelled', but a was delivered"),
        (lambda _: None, Cancelled.DELIVERED, "answered 'delivered', but nothing of it was seen"),
        (lambda _: None, Cancelled.UNKNOWN, "answered 'unknown', but a waits"),
    ],
    ids=["no such message", "cancelled after delivery", "delivered and never seen", "unknown and it waits"],
)
def test_an_untrue_answer_to_a_cancel_is_noticed(model: Model, given: Given, answer: Cancelled, said: str) -> None:
    sent(model, "a", T0)
    given(model)
    due = T0 + 1 if "no such" in said else T0
    with pytest.raises(Broken, match=said):
        model.check_answer(asked("a", due), answer, in_table=frozenset())


def test_delivered_is_untrue_while_a_copy_waits(model: Model) -> None:
    sent(model, "a", T0)
    copy = sent(model, "b", T0)
    copy.unique_key = "ua"
    model.look(0, 0, ["a"], 0)
    with pytest.raises(Broken, match="answered 'delivered', but b still waits"):
        model.check_answer(asked("a", T0), Cancelled.DELIVERED, in_table=frozenset())
    model.check_answer(asked("a", T0), Cancelled.DELIVERED, in_table=frozenset({"b"}))


def test_a_cancel_names_only_messages_before_it(model: Model) -> None:
    sent(model, "a", T0, arrival=2_000)
    assert model.matching(asked("a", T0, arrival=2_000)) == []
    assert [m.name for m in model.matching(asked("a", T0, arrival=2_001, by="key"))] == ["a"]


def test_an_untrue_answer_from_the_table_is_noticed(model: Model) -> None:
    sent(model, "a", T0, arrival=7)
    model.note_applied(cancel := asked("a", T0))
    with pytest.raises(Broken, match="answered 'unknown', but a waits in the table"):
        model.check_table_answer(cancel, Cancelled.UNKNOWN, {7})
    model.check_table_answer(cancel, Cancelled.UNKNOWN, set())
    model.look(0, 0, ["a"], 0)
    model.check_table_answer(cancel, Cancelled.UNKNOWN, {7})
    with pytest.raises(Broken, match="answered 'cancelled', but nothing of it was left to cancel"):
        model.check_table_answer(cancel, Cancelled.CANCELLED, {7})


def test_a_message_cancelled_in_the_table_must_not_be_seen(model: Model) -> None:
    sent(model, "a", T0, arrival=7)
    model.note_applied(cancel := asked("a", T0))
    model.check_table_answer(cancel, Cancelled.CANCELLED, {7})
    with pytest.raises(Broken, match="a was cancelled and is in queue 0"):
        model.look(0, 0, ["a"], 0)


SERVED = [Op("serve", (3,)), Op("send", (3, 20_000, 0, 0, 3)), Op("serve", (5,))]


def test_a_rescue_from_a_pipeline_in_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(SERVED)
    monkeypatch.setattr(Rescuer, "rescue_lead_ms", 9_900)
    with pytest.raises(Broken, match="messages were rescued from a pipeline in time"):
        run_history(SERVED)


def test_a_table_with_another_count_than_the_broker_s_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = SimulatedTable.append

    def lossy(self: SimulatedTable, rows: list[TableRow], read_until: int, broker: Broker) -> None:
        append(self, rows, read_until, broker)
        del self.rows[-1:]

    monkeypatch.setattr(SimulatedTable, "append", lossy)
    with pytest.raises(Broken, match="the table holds 2 rows that wait, the broker says 3"):
        run_history(SERVED)


MOVED = [
    Op("send", (3, 8_000, 0, 0, 1)), Op("flush"), Op("move", (0, 0, 20_000)), Op("flush"), Op("pass", (10_000,)),
]  # fmt: skip


def test_a_broker_that_leaves_both_copies_of_a_moved_message_alive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(MOVED)
    monkeypatch.setattr(Moves, "remember", lambda *_: None)
    with pytest.raises(Broken, match=r"m1 (is due at|was due at|stands|is in)"):
        run_history(MOVED)


def test_a_broker_that_forgets_the_first_handle_of_a_moved_message_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [*MOVED, Op("cancel", (0, 0)), Op("flush")]
    run_history(history)
    trace = CancelCalls.trace
    monkeypatch.setattr(CancelCalls, "trace", lambda *of: trace(*of)._replace(may_be_moved=False))
    with pytest.raises(Broken, match="answered 'unknown', but m1 waits"):
        run_history(history)


def test_an_index_that_lags_behind_the_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the move has left the log, so that only the table leads to the message."""
    history = [*MOVED, Op("cancel", (0, 0)), Op("flush")]
    run_history(history)
    monkeypatch.setattr("verify.simulation.cancellers.find_waiting", lambda *_: {})
    with pytest.raises(Broken, match="answered 'unknown', but m1 waits"):
        run_history(history)


ONCE, OTHER = (Op("send_once", (0, is_other, 3, 8_000, 0)) for is_other in (0, 1))


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_a_broker_that_forgets_ids_with_a_restart_is_noticed(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    history = [ONCE, Op("flush"), Op("snapshot", (0,)), Op(ending), ONCE]
    run_history(history)
    monkeypatch.setattr(Once, "index", lambda _: None)
    with pytest.raises(Broken, match="m1 was stored under once0, as m1 is"):
        run_history(history)


def test_a_broker_that_takes_another_body_under_an_id_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [ONCE, Op("flush"), OTHER]
    run_history(history)
    monkeypatch.setattr("postdate.broker.once.OnceCalls._compare", lambda *_: None)
    with pytest.raises(Broken, match="answered as an earlier one, none has its body"):
        run_history(history)


def test_a_broker_that_gives_a_second_send_another_receipt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [ONCE, Op("flush"), ONCE]
    run_history(history)
    check = Oncers._check
    monkeypatch.setattr(
        Oncers, "_check", lambda self, taken, first: check(self, taken, first._replace(unique_key="U2"))
    )
    with pytest.raises(Broken, match=r"a second send of m1 was answered .*'U2'.*, the first .*'U1'"):
        run_history(history)


HALF, COMMIT, ROLL_BACK, ROLL_BACK_AND_COMMIT = (
    Op("half", (3, 8_000, 0, 0)), Op("end", (0, 0)), Op("end", (0, 1)), Op("end", (1, 3)),
)  # fmt: skip


def test_a_broker_that_shows_a_half_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [Op("half", (0, 0, 0, 0)), Op("flush")]
    run_history(history)
    apply_half = Fold._apply_half

    def show(self: Fold, batch: Batch, row: tuple[int, ...]) -> int:
        self._append_entry(row[3], batch.offset + row[9], row[8], 0, batch.at_ms)
        return apply_half(self, batch, row)

    monkeypatch.setattr(Fold, "_apply_half", show)
    with pytest.raises(Broken, match="m1 was never sent"):
        run_history(history)


@pytest.mark.parametrize("history", [[COMMIT, Op("flush"), COMMIT], [Op("end", (0, 2))]], ids=["later", "at once"])
def test_a_broker_that_commits_twice_is_noticed(monkeypatch: pytest.MonkeyPatch, history: list[Op]) -> None:
    history = [Op("half", (0, 0, 0, 0)), Op("flush"), *history, Op("flush")]
    run_history(history)
    end = Transactions.end

    def end_again(self: Transactions, offset: int, *, is_committed: bool) -> Ended:
        answer = end(self, offset, is_committed=is_committed)
        return Ended.COMMITTED if answer is Ended.ALREADY_COMMITTED else answer

    monkeypatch.setattr(Transactions, "end", end_again)
    monkeypatch.setattr(Transactions, "how_ended", lambda *_: Ended.COMMITTED)
    with pytest.raises(Broken, match="an earlier one has committed it"):
        run_history(history)


def test_a_broker_that_delivers_what_was_rolled_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [Op("half", (0, 0, 0, 0)), Op("flush"), ROLL_BACK_AND_COMMIT, Op("flush")]
    run_history(history)
    apply_commit = Fold._apply_commit

    def apply_any(self: Fold, batch: Batch, row: tuple[int, ...]) -> Ended:
        answer = apply_commit(self, batch, row)
        self._apply_message(batch, row)
        return answer

    monkeypatch.setattr(Fold, "_apply_commit", apply_any)
    with pytest.raises(Broken, match="m1 was never sent"):
        run_history(history)


def test_a_broker_that_forgets_halves_with_a_restart_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [HALF, Op("flush"), Op("snapshot", (0,)), Op("kill"), COMMIT, Op("flush")]
    run_history(history)
    monkeypatch.setattr(Transactions, "load", lambda *_: None)
    with pytest.raises(Broken, match=r"acknowledged at|open no more|check: "):
        run_history(history)


@pytest.mark.parametrize("first", [COMMIT, ROLL_BACK], ids=["commit", "rollback"])
def test_a_broker_that_forgets_how_a_transaction_has_ended_is_noticed(
    monkeypatch: pytest.MonkeyPatch, first: Op
) -> None:
    history = [HALF, Op("flush"), first, Op("flush"), COMMIT, Op("flush")]
    run_history(history)
    monkeypatch.setattr(Transactions, "how_ended", lambda *_: Ended.UNKNOWN)
    with pytest.raises(Broken, match="answered unknown, it was acknowledged"):
        run_history(history)


def test_a_broker_that_contradicts_itself_about_a_transaction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [HALF, Op("flush"), ROLL_BACK, Op("flush"), COMMIT, Op("flush")]
    run_history(history)
    monkeypatch.setattr(Transactions, "how_ended", lambda *_: Ended.ALREADY_COMMITTED)
    with pytest.raises(Broken, match="answered already_committed, and no earlier one"):
        run_history(history)


def test_a_broker_that_asks_too_early_or_about_what_was_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    early = [HALF, Op("flush"), Op("pass", (500,)), Op("checks", (2, 0))]
    ended = [HALF, Op("flush"), ROLL_BACK, Op("flush"), Op("pass", (10_000,)), Op("checks", (2, 0))]
    run_history(early)
    run_history(ended)
    take_due_checks = TransactionCalls.take_due_checks
    monkeypatch.setattr(TransactionCalls, "take_due_checks", lambda self, at_ms: take_due_checks(self, at_ms + 9_000))
    with pytest.raises(Broken, match="the broker asks about m1, stored at"):
        run_history(early)
    monkeypatch.undo()
    known: list[OpenHalf] = []

    def remember(self: TransactionCalls, half: Half) -> OpenHalf:
        known.append(read(self, half))
        return known[-1]

    read = TransactionCalls._read
    monkeypatch.setattr(TransactionCalls, "_read", remember)
    monkeypatch.setattr(TransactionCalls, "take_due_checks", lambda *_: known[:1])
    with pytest.raises(Broken, match="asks about m1, which was ended"):
        run_history(ended)


def test_a_broker_whose_delay_counts_from_the_half_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [HALF, Op("flush"), Op("pass", (1_000,)), COMMIT, Op("flush")]
    run_history(history)
    prepare = SendCalls.prepare_moved
    monkeypatch.setattr(SendCalls, "prepare_moved", lambda self, message, at_ms: prepare(self, message, at_ms - 1_000))
    with pytest.raises(Broken, match=r"check: |m1 was committed for"):
        run_history(history)


@pytest.mark.parametrize("how", range(4))
def test_a_broker_that_accepts_any_table_is_noticed(monkeypatch: pytest.MonkeyPatch, how: int) -> None:
    history = [*SERVED, Op("register_foreign", (how,))]
    run_history(history)
    monkeypatch.setattr("postdate.broker.ownership.refuse_foreign", lambda *_: None)
    with pytest.raises(Broken, match="was accepted by the broker"):
        run_history(history)


def test_a_message_that_a_job_has_changed_is_not_seen_at_its_old_due(model: Model) -> None:
    cancelled, moved = sent(model, "a", T0), sent(model, "b", T0)
    model.note_change(cancelled, True, 0, -1)
    model.note_change(moved, False, 5, own_arrival(0))
    with pytest.raises(Broken, match="a was cancelled and is in queue 0"):
        model.look(0, 0, ["a"], 0)
    with pytest.raises(Broken, match=f"b is due at {T0 + 5} and was seen when no clock had passed {T0}"):
        model.look(0, 0, ["b"], 0)
    model.clock_max = T0 + 5
    model.look(0, 0, ["b"], 0)


def test_a_job_that_changes_a_delivered_or_cancelled_message_is_noticed(model: Model) -> None:
    delivered, cancelled = sent(model, "a", T0), sent(model, "b", T0)
    model.look(0, 0, ["a"], 0)
    model.check_answer(asked("b", T0), Cancelled.CANCELLED, in_table=frozenset())
    with pytest.raises(Broken, match=r"has changed a, which is at \(0, 0\)"):
        model.note_change(delivered, True, 0, -1)
    with pytest.raises(Broken, match="has changed b, which was cancelled"):
        model.note_change(cancelled, False, 5, own_arrival(0))


def test_a_cancel_names_a_postponed_message_by_its_first_due_and_by_its_new_one(model: Model) -> None:
    model.note_change(sent(model, "a", T0), False, 5, own_arrival(3))
    for due, jobs, names in ((T0, 4, ["a"]), (T0 + 5, 4, ["a"]), (T0 + 1, 4, []), (T0 + 5, 3, [])):
        cancel = asked("a", due)
        cancel.jobs = jobs
        assert [m.name for m in model.matching(cancel)] == names


FAR, FLUSH, REGISTER = Op("send", (3, 20_000, 0, 0, 2)), Op("flush"), Op("register")
CANCEL_ALL = Op("job", (0, 2, 0))
TAKE = Op("read", (9,))
# The table takes what came before the job; then the job is selected and decided, and the table follows.
DECIDED = [FAR, FLUSH, CANCEL_ALL, FLUSH, REGISTER, TAKE, Op("stage", (0,)), Op("select", (4,))]
CHANGED = [*DECIDED, TAKE, Op("stage", (30_000,)), Op("pass", (30_000,))]


def test_a_job_that_misses_a_message_of_its_predicate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(CHANGED)
    selected_by = SimulatedPipeline._selected_by
    monkeypatch.setattr(SimulatedPipeline, "_selected_by", lambda *arguments: selected_by(*arguments)[1:])
    with pytest.raises(Broken, match=r"job 0 \(key=k0\) has not changed m1, which waits"):
        run_history(CHANGED)


def test_a_job_that_selects_another_message_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [Op("send", (3, 20_000, 1, 0, 1)), *CHANGED]
    run_history(other)
    monkeypatch.setattr(pipelines, "selects", lambda *_: True)
    with pytest.raises(Broken, match=r"job 0 \(key=k0\) has selected"):
        run_history(other)


def test_a_table_that_does_not_follow_a_decision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedPipeline, "_drop_rows", lambda *_: [])
    with pytest.raises(Broken, match="m1 was cancelled and is in queue"):
        run_history(CHANGED)


def test_a_job_whose_result_changes_is_noticed() -> None:
    world = World()
    for op in DECIDED:
        world.run(op)
    assert world.broker is not None
    (job,) = world.broker.fold.jobs.all()
    job.changed, job.late = 1, 1
    with pytest.raises(Broken, match="job 0 is decided and was"):
        world.look()


def test_one_id_is_one_job_however_often_it_is_asked_for() -> None:
    world = World()
    for op in (*CHANGED, CANCEL_ALL, FLUSH, Op("kill"), CANCEL_ALL, FLUSH):
        world.run(op)
    assert world.broker is not None
    (job,) = world.broker.fold.jobs.all()
    assert (job.state, job.rows, job.changed, job.late) == ("done", 2, 2, 0)
    world.broker.fold.jobs.begin("cancel", "other", 0, "waiting").id = job.id
    with pytest.raises(Broken, match="job 1 is of the id job-0, as job 0 is, which has not failed"):
        world.look()


def test_an_unanswered_cancel_may_have_worked_or_not(model: Model) -> None:
    for name in ("a", "b"):
        sent(model, name, T0)
        model.note_unanswered(asked(name, T0))
    model.look(0, 0, ["a"], 0)
    model.check_complete(T0, frozenset())


# ------------------------------------------------------------------------------------------------------- digests


def test_a_seed_has_one_digest_and_another_seed_has_another() -> None:
    assert digest_seed(4) == digest_seed(4)
    assert digest_seed(4) != digest_seed(5)


def test_one_answer_that_differs_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted("retention", (Op("send", (0, 0, 0, 0, 1)), Op("flush"), Op("retain"), Op("flush")))
    before, retain = digest_planted(planted), Broker.retain
    monkeypatch.setattr(Broker, "retain", lambda self, at_ms: retain(self, at_ms) + 1)
    assert digest_planted(planted) != before


def test_one_bit_on_the_disk_that_differs_changes_the_digest() -> None:
    def digest_of(disk: VirtualDisk) -> str:
        digest = Digest()
        digest.note_disk(disk)
        return digest.hex()

    disk = VirtualDisk()
    disk.write("folder/file", 0, b"content")
    twin = disk.copy()
    assert digest_of(twin) == digest_of(disk)
    twin.flip("folder/file", 3)
    assert digest_of(twin) != digest_of(disk)


def test_a_broken_promise_is_part_of_the_digest() -> None:
    delivered = (Op("send", (3, 1_000, 0, 0, 1)), Op("flush"), Op("pass", (2_000,)))
    held, broken = Planted("a name", delivered, seen=("m1",)), Planted("a name", delivered, unseen=("m1",))
    assert digest_planted(broken) != digest_planted(held)
    assert digest_planted(broken) == digest_planted(broken)


def test_a_digest_depends_on_values_and_not_on_names() -> None:
    class Pair(NamedTuple):
        first: int
        second: Cancelled

    @dataclass
    class Renamed:
        one: np.int64
        two: str

    def digest_of(*answers: object) -> str:
        digest = Digest()
        digest.note("call", *answers)
        return digest.hex()

    assert (
        digest_of(Pair(7, Cancelled.UNKNOWN)) == digest_of(Renamed(np.int64(7), "unknown")) == digest_of([7, "unknown"])
    )
    assert digest_of(7, "unknown") != digest_of([7, "unknown"])
    with pytest.raises(TypeError, match="a object has no place in a digest"):
        digest_of(object())


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_runs_seeds_and_says_how_many_held() -> None:
    arguments = [sys.executable, "-m", "verify.simulation", "--seeds", "4"]
    ran = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "4 seeds held, 0 failed (seeds 0 to 3)\n"), ran.stderr


def test_the_command_prints_digests_in_the_order_of_seeds() -> None:
    arguments = [sys.executable, "-m", "verify.simulation", "--digest", "--from", "20", "--seeds", "6"]
    first, second = (
        subprocess.run(
            arguments, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for seed in ("1", "2")
    )
    assert first == second
    names = [f"seed {seed}" for seed in range(20, 26)] + [f"planted {planted.name}" for planted in PLANTED]
    assert [line.rpartition(" ")[0] for line in first] == names
    assert first[0] == f"seed 20 {digest_seed(20)}"


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--seeds", "many"], ["--workers", "-1"], ["--colour"], ["7"]])
def test_a_bad_argument_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m verify.simulation")


def test_a_failing_seed_is_printed_with_its_shortest_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure(12, [Op("send", (3, 1, 0, 0, 1)), Op("kill")], Broken("m1 came twice"))
    monkeypatch.setattr(command, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(command, "run_seed", lambda seed: failure if seed == 12 else None)
    assert command.main(["--seeds", "5", "--from", "10", "--workers", "1"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "4 seeds held, 1 failed (seeds 10 to 14)\n"
    assert shown.err.strip() == (
        "seed 12: Broken: m1 came twice\nshortest history found:\n  send(3, 1, 0, 0, 1)\n  kill()"
    )


def test_an_interrupt_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert command.main([]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_example_of_the_package_runs() -> None:
    assert simulation.__doc__ is not None
    _, _, indented = simulation.__doc__.partition("\n\n")
    example, _, _ = indented.partition("\n\n`python -m")
    names: dict[str, object] = {}
    exec(textwrap.dedent(example), names)
    assert isinstance(names["disk"], simulation.VirtualDisk)
    assert "FORMAT" in names["disk"].paths()
