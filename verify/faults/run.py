"""An episode: a machine, its crew and its faults, from an empty folder to the verdict.

A long run is many episodes, each with its own folder and its own seed, so that a violation has a short history and an
early one does not hide a later one.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verify.faults import checker
from verify.faults.checker import Bounds, Violation
from verify.faults.control import BROKER
from verify.faults.driver import Hung, Lost
from verify.faults.history import Event, History
from verify.faults.machine import Machine, Stuck
from verify.faults.points import Turns
from verify.faults.troubles import AWAY, TROUBLES, Scene, Trouble, choose_trouble
from verify.faults.workload import Crew, Load

SAY_S = 10.0
STEP_MS, DISTANT_STEP_MS = 60_000, 3_600_000  # of the clock, at the end of an episode
QUIET_S = 45.0
RETURNS_S = 20.0  # for retries of a second's delay


@dataclass(frozen=True)
class Plan:
    """How long an episode is, and what happens in it."""

    seconds: float  # of faults, from when the pipeline is up
    load: Load = field(default_factory=Load)
    bounds: Bounds = field(default_factory=Bounds)
    with_pipeline: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the broker, beside those of the suite
    gap_s: tuple[float, float] = (1.0, 8.0)
    quiet_share: float = 0.1  # of the gaps between faults are long: only what is away from faults must be on time
    pause_s_max: float = 120.0
    drain_s: float = 240.0  # at the end: for all that is due to come, and to be read
    troubles: tuple[Trouble, ...] = ()  # in this order, again and again; () leaves it to the dice

    def shortened(self, seconds: float) -> "Plan":
        return replace(self, seconds=min(self.seconds, seconds))

    def turns(self) -> Turns:
        """Turns through the fault points of the processes that run."""
        return Turns() if self.with_pipeline else Turns([BROKER])


@dataclass
class Result:
    seed: int
    violations: list[Violation]
    events: list[Event]
    summary: str


class Episode:
    """Runs one episode. `stop` ends its faults early; the verdict comes all the same."""

    def __init__(
        self, folder: Path, seed: int, plan: Plan, say: Callable[[str], None], turns: Turns | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._plan, self._seed, self._say = plan, seed, say
        self._dice = random.Random(seed)
        self.history = History(folder / "history.jsonl")
        self._machine = Machine(folder, self.history, plan.with_pipeline, plan.settings)
        self._crew = Crew(self._machine.driver, self.history, plan.load, seed)
        self._scene = Scene(
            self._machine, self._crew, self.history, self._dice, plan.pause_s_max, turns or plan.turns()
        )
        self._stopping = threading.Event()
        self._places: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> Result:
        sampling = threading.Thread(target=self._sample, daemon=True)
        try:
            self._machine.start()
            self._machine.driver.prepare()
            sampling.start()
            self._crew.start()
            self._suffer()
            self._drain()
            self._machine.count_writes()
            self._machine.stop()
            self._machine.examine()
        except (Stuck, Lost, Hung) as error:
            self.history.note_finding("I1", f"it cannot go on: {error}")
        finally:
            self._stopping.set()
            self._machine.end()
            self.history.close()
        return self._result()

    def _sample(self) -> None:
        while not self._stopping.wait(1.0):
            self._machine.sample()

    # -- the troubles -------------------------------------------------------------------------------------------------

    def _suffer(self) -> None:
        self._say("producers and consumers are at work")
        self._machine.await_pipeline()
        said_at = time.monotonic()
        end = said_at + self._plan.seconds
        while time.monotonic() < end and not self._stopping.wait(self._gap(end)):
            trouble = self._next()
            with self.history.trouble(trouble.name, trouble.is_excuse):
                trouble.run(self._scene)
                self._scene.await_service()
            self._counts[trouble.name] += 1
            if time.monotonic() - said_at > SAY_S:
                said_at = time.monotonic()
                self._say(self._progress(end - said_at, trouble.name))

    def _gap(self, end: float) -> float:
        is_long = self._dice.random() < self._plan.quiet_share
        gap_s = QUIET_S if is_long else self._dice.uniform(*self._plan.gap_s)
        return max(0.0, min(gap_s, end - time.monotonic()))

    def _next(self) -> Trouble:
        if self._plan.troubles:
            return self._plan.troubles[self._counts.total() % len(self._plan.troubles)]
        troubles = AWAY if self._plan.load.with_table else TROUBLES
        return choose_trouble(troubles, self._dice, self._plan.with_pipeline)

    def _progress(self, left_s: float, last: str) -> str:
        kinds = Counter(event["kind"] for event in list(self.history.events))
        return (
            f"{max(left_s, 0):5.0f} s left, {kinds['sent']:,} sent, {kinds['saw']:,} seen, "
            f"{kinds['cancelled']:,} cancels, {self._counts.total()} faults, the last: {last}"
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Ends the faults, lets time pass until everything is due, and lets all consumers read to the end."""
        self._say("no more faults: waiting for all that is due")
        with self.history.trouble("the end"):
            self._scene.await_service()
            self._machine.await_pipeline()
            self._crew.stop_makers()
            self._machine.history.note("makers have stopped")
            self._come_due()
        self._read_to_the_end()
        self._crew.stop_readers()
        self._read_returns()

    def _come_due(self) -> None:
        """Steps the clock until everything is due: by minutes, and by hours where messages wait for days."""
        case = checker.Case(self.history.events)
        for due_at_ms in sorted({int(due) for message in case.messages.values() for due in case.dues(message)}):
            left_ms = due_at_ms + 1 - self.history.broker_ms()
            if left_ms > 0:
                self._machine.step_clock(STEP_MS if left_ms <= STEP_MS else left_ms + DISTANT_STEP_MS)
                time.sleep(0.2)

    def _read_to_the_end(self) -> None:
        """Reads until every message that must come is in its queue and every group has seen it, or until time is up."""
        case = checker.Case(self.history.events)
        missing = {key for key, message in case.messages.items() if message.must_come}
        groups = {kind: set(missing) for kind in self._machine.driver.consumer_kinds}
        read, end = 0, time.monotonic() + self._plan.drain_s
        while time.monotonic() < end and (missing or any(groups.values())):
            entries = list(self._machine.driver.entries(self._places))
            self.history.note_entries(entries)
            missing -= {entry.key for entry in entries}
            events, read = self.history.events[read:], len(self.history.events)
            for event in events:
                if event["kind"] == "saw":
                    groups[event["group"]].discard(event["key"])
            time.sleep(0.2)
        for kind in groups:
            self.history.note("read", group=kind)

    def _read_returns(self) -> None:
        """Waits for the messages that were sent back last: they come a second later."""
        sure = Counter((event["group"], event["key"]) for event in self.history.events if event["kind"] == "backed")
        end = time.monotonic() + RETURNS_S
        while True:
            found = Counter(self._machine.driver.returned_messages())
            groups = {group for group, _ in found}
            is_complete = all(found[each] >= count for each, count in sure.items() if each[0] in groups)
            if is_complete or time.monotonic() > end:
                break
            time.sleep(0.2)
        for group, key in found.elements():
            self.history.note("returned", group=group, key=key)
        self.history.note("returns were read")

    def _result(self) -> Result:
        violations = checker.judge(self.history.events, self._plan.bounds)
        return Result(self._seed, violations, self.history.events, self._summary())

    def _summary(self) -> str:
        case = checker.Case(self.history.events)
        kinds = Counter(event["kind"] for event in self.history.events)
        outcomes = Counter(str(asked.outcome) for message in case.messages.values() for asked in message.cancels)
        moves = Counter(str(asked.outcome) for message in case.messages.values() for asked in message.moves)
        sent = Counter(str(message.outcome) for message in case.messages.values())
        late = sorted(span for span, _ in checker.lateness(case, self._plan.bounds))
        resident = max((event["resident"] for event in case.by_kind["sample"]), default=0)
        late_text = (
            f"{len(late)} away from faults, p50 {late[len(late) // 2]:.0f} ms, worst {late[-1]:.0f}" if late else "-"
        )
        return (
            f"{dict(sent)}, {kinds['saw']:,} seen, cancels {dict(outcomes)}, "
            f"moves {dict(moves)}, {kinds['job']} jobs; "
            f"{self._counts.total()} faults {dict(self._counts)}; late: {late_text}; {resident >> 20} MiB"
        )


def history_of(events: list[Event], key: str) -> list[Event]:
    """The events of one message, and the faults between them."""
    return [
        event
        for event in events
        if event.get("key") == key or event["kind"] in ("trouble", "over", "clock", "power", "point", "start")
    ]
