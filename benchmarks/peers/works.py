"""The works, the same for every system: what is sent, what is waited for, what is counted.

```
 one life, durable:   warm up - spread (a, g) - burst (b, g)
 another, durable:    warm up - load (c, d) - cancel (f) - kill -9, restart (e)
 a third, durable:    warm up - ten times the burst (b, d), where its sends take no longer than the limit
 a fourth, volatile:  warm up - sends (c)
```

Some systems sync the disk for each message by itself. Where durable sends take too long for the works, only their rate
is measured, and the first three lives are volatile, too; this is told with every step.
"""

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.peers import observed, usage
from benchmarks.peers.plan import HOUR_MS, Plan
from benchmarks.peers.system import CANCELLED, NotRun, Received, System

SLACKS = (1.4, 2.5)  # how much longer than expected sending may take before the first is due
WARM_FIRST, WARM_S, WARM_LIMIT_S = 200, 4.0, 30.0
CHUNK_S = 2.0  # what is sent at once of a load: longer than it takes to fill and to drain a pipeline
SLOW_S = 10.0  # of sends that are too slow for all else
CANCELS_FIRST = 200  # what is cancelled at once, before the rate is known
POLL_S = 0.002
STRIDE_MS = 777_767  # without a common factor with an hour


class NotFinished(Exception):
    """A work took too long; the sentence says how far it came."""


class Tell(Protocol):
    """Whoever listens: the process that started this one, or a test."""

    def step(self, name: str, title: str) -> None: ...

    def figure(self, key: str, value: float) -> None: ...

    def note(self, step: str, sentence: str) -> None: ...


class Cost:
    """CPU between its making and now, of the servers and of the client."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._servers, self._client = self._spent()

    def _spent(self) -> tuple[float, float]:
        return usage.cpu_s(self._system.pids()), time.process_time() + usage.cpu_s(self._system.client_pids())

    def tell(self, tell: Tell, name: str, count: int) -> None:
        servers, client = self._spent()
        tell.figure(f"g_{name}_server", (servers - self._servers) / count * 1e6)
        tell.figure(f"g_{name}_client", (client - self._client) / count * 1e6)


class Life:
    """A system from its start to its stop, and the numbers of the messages that it got."""

    def __init__(self, system: System, plan: Plan) -> None:
        self.system, self.plan = system, plan
        self._next_index = 0
        self.rate = 0.0  # of sends, as far as is known

    def warm(self) -> None:
        """Every way of the system is taken, and what its sends take is known: first by few, in case they take long."""
        self._warm(min(WARM_FIRST, self.plan.warm_count))
        self._warm(min(max(int(self.rate * WARM_S), 1), self.plan.warm_count))

    def _warm(self, count: int) -> None:
        due_ms = now_ms() + self.plan.warm_due_s * 1_000
        first, _ = self.send([int(due_ms)] * count)
        found = self.collect(first, count, max(due_ms, now_ms()), WARM_LIMIT_S)
        if len(found.indexes) < count:
            raise NotFinished(f"only {len(found.indexes):,} of the first {count:,} messages came")

    def send(self, dues_ms: Sequence[int]) -> tuple[int, list[bytes | str]]:
        """The number of the first, and what a cancel needs of each."""
        first, start = self._next_index, time.perf_counter()
        self._next_index += len(dues_ms)
        handles = self.system.schedule(dues_ms, first)
        self.rate = len(dues_ms) / (time.perf_counter() - start)
        return first, handles

    def send_ahead(self, offsets_ms: np.ndarray, limit_s: float) -> tuple[int, float]:
        """Sends messages due so long after an instant that is as soon as the sends allow: the number of the first, and
        the instant. Raises NotFinished where that would be later than the limit, and some slack."""
        count = len(offsets_ms)
        for slack in SLACKS:
            send_s = count / self.rate * slack
            if send_s > SLACKS[0] * limit_s:
                break
            at_ms = int(now_ms() + (send_s + self.plan.ahead_s) * 1_000)
            first, _ = self.send([int(due) for due in at_ms + offsets_ms])
            if now_ms() < at_ms - self.plan.quiet_s * 1_000:
                return first, at_ms
            self.collect(first, count, at_ms + float(offsets_ms.max()), self.plan.receive_limit_s)
        raise NotFinished(
            f"{count:,} messages could not be sent before the first was due (at {self.rate:,.0f} a second)"
        )

    def collect(self, first: int, count: int, due_ms: float, limit_s: float, wanted: int | None = None) -> Received:
        """What has come of so many until so long after an instant, each once: all, or as many as are wanted."""
        parts: list[Received] = []
        found = observed.joined(parts)
        wanted = count if wanted is None else wanted
        while len(found.indexes) < wanted and (left_s := (due_ms - now_ms()) / 1_000 + limit_s) > 0:
            parts.append(self.system.receive(wanted - len(found.indexes), left_s))
            found = observed.of_range(observed.joined(parts), first, count)
        return Received(found.indexes - first, found.at_ms)


class Works:
    """All works of one system in one round."""

    def __init__(
        self,
        kind: type[System],
        plan: Plan,
        works: frozenset[str],
        folder: Path,
        tell: Tell,
        *,
        is_patient: bool = True,
    ) -> None:
        self._kind, self._plan, self._folder, self._tell, self._is_patient = kind, plan, folder, tell, is_patient
        self._works = works & kind.works
        self._is_broken = False
        self._rate = 0.0  # the best of sends so far
        self._slow = ""  # why the works are done with sends that are not durable

    def run(self) -> None:
        if self._works & frozenset("abcg"):  # c: whether durable sends are too slow is found out there
            self._first_life()
        if self._slow:
            self._first_life()
        if self._works & frozenset("cdef"):
            self._loaded_life()
        if "b" in self._works:
            self._second_life()
        if "c" in self._works and not self._slow:
            self._third_life()

    def _first_life(self) -> None:
        wanted = self._works
        with self._life("again" if self._slow else "first", not self._slow) as life:
            if life is None or self._finds_slow(life):
                return
            if wanted & frozenset("ag"):
                self._step("spread", f"{self._plan.spread_count:,} spread over time", self._spread, life)
            if wanted & frozenset("bg"):
                self._step("burst", f"{self._plan.burst_count:,} due at one instant", self._burst, life)

    def _loaded_life(self) -> None:
        """One of its own: what a burst has left in memory would be taken for that of what waits, or hide it."""
        with self._life("loaded", not self._slow) as life:
            if life is not None:
                self._loaded(life)

    def _finds_slow(self, life: Life) -> bool:
        """Whether all must be done in another life, because durable sends take too long."""
        count = self._plan.burst_count if "b" in self._works else self._plan.spread_count
        if self._slow or count <= life.rate * self._plan.send_limit_s:
            return False
        if "c" in self._works:
            self._step("slow", "durable sends", self._durable_sends, life)
        self._slow = f"with sends that are not durable; durable ones take too long, at {life.rate:,.0f} a second"
        return True

    def _loaded(self, life: Life) -> None:
        handles: list[bytes | str] = []
        self._step("load", f"{self._plan.million:,} that wait", lambda life: handles.extend(self._load(life)), life)
        if "f" in self._works:
            self._step("cancel", f"{self._plan.cancel_count:,} cancels", lambda life: self._cancel(life, handles), life)
        if "e" in self._works:
            self._step("restart", "kill -9 and restart", self._restart, life)

    def _second_life(self) -> None:
        count, rate = self._plan.million, self._rate
        if count > rate * self._plan.send_limit_s:
            how = "in the first round only" if count <= rate * self._plan.patient_limit_s else "not at all"
            seconds = f"{count / max(rate, 1):,.0f} s"
            self._tell.note("million", f"{count:,} at one instant: {how}, since sending them takes {seconds}")
        if count > rate * self._million_limit_s:
            return
        with self._life("second", not self._slow) as life:
            if life is not None:
                life.rate = self._rate
                self._step("million", f"{self._plan.million:,} due at one instant", self._million, life)

    @property
    def _million_limit_s(self) -> float:
        return self._plan.patient_limit_s if self._is_patient else self._plan.send_limit_s

    def _third_life(self) -> None:
        with self._life("third", False) as life:
            if life is not None:
                self._step("volatile", f"{self._plan.volatile_count:,} sends, not durable", self._volatile, life)

    @contextmanager
    def _life(self, name: str, is_durable: bool) -> Iterator[Life | None]:
        """None where it did not come to life; then the reason is told."""
        folder = self._folder / name
        folder.mkdir()
        system = self._kind(folder, is_durable)
        life = Life(system, self._plan)
        self._is_broken = False
        try:
            self._step("start", f"start, {name} life, {'durable' if is_durable else 'volatile'}", _start, life)
            self._step("start", "warming up", Life.warm, life)
            yield None if self._is_broken else life
        finally:
            system.stop()

    def _step(self, name: str, title: str, work: Callable[[Life], None], life: Life) -> None:
        """Whatever goes wrong is told as the reason why there is no figure."""
        if self._is_broken:
            self._tell.note(name, "not run: what came before it failed")
            return
        self._tell.step(name, title)
        if self._slow and name != "start":
            self._tell.note(name, self._slow)
        self._sync()  # what was written before must not be this one's lateness
        gc.collect()
        try:
            work(life)
            self._rate = max(self._rate, life.rate)
        except (NotRun, NotFinished) as reason:
            self._tell.note(name, str(reason))
            self._is_broken = name == "start"
        except Exception as error:
            traceback.print_exc()
            self._tell.note(name, f"failed: {type(error).__name__}: {str(error)[:300]}")
            self._is_broken = name != "cancel"  # after that only the restart comes, which makes all new

    def _sync(self) -> None:
        if self._plan.is_synced:
            os.sync()

    # -- works ----------------------------------------------------------------------------------------------------

    def _spread(self, life: Life) -> None:
        plan, cost = self._plan, Cost(life.system)
        offsets = np.arange(plan.spread_count) * plan.spread_ms // plan.spread_count
        first, at_ms = life.send_ahead(offsets, plan.send_limit_s)
        found = life.collect(first, plan.spread_count, at_ms + plan.spread_ms, plan.receive_limit_s)
        cost.tell(self._tell, "spread", plan.spread_count)
        if not len(found.indexes):
            raise NotFinished(f"nothing was received within {plan.receive_limit_s:g} s")
        seen = observed.spread(found, at_ms + offsets)
        for name, value in (
            ("p50", seen.p50_ms), ("p99", seen.p99_ms), ("max", seen.max_ms), ("early", seen.early),
            ("inversions", seen.inversions), ("missing", plan.spread_count - len(found.indexes)),
        ):  # fmt: skip
            self._tell.figure(f"a_{name}", value)

    def _burst(self, life: Life) -> None:
        plan, cost = self._plan, Cost(life.system)
        first, at_ms = life.send_ahead(np.zeros(plan.burst_count, np.int64), plan.send_limit_s)
        found = life.collect(first, plan.burst_count, at_ms, plan.receive_limit_s)
        cost.tell(self._tell, "burst", plan.burst_count)
        self._tell_span("b_first", "b_last", found, plan.burst_count, at_ms)

    def _tell_span(self, first_key: str, last_key: str, found: Received, count: int, at_ms: float) -> None:
        if len(found.at_ms) and first_key:
            self._tell.figure(first_key, float(found.at_ms.min() - at_ms) / 1_000)
        if len(found.at_ms) < count:
            raise NotFinished(
                f"not finished within {self._plan.receive_limit_s:g} s: {len(found.at_ms):,} of {count:,} were received"
            )
        self._tell.figure(last_key, float(found.at_ms.max() - at_ms) / 1_000)

    def _load(self, life: Life) -> list[bytes | str]:
        """Sends what then waits; returns the handles of as many as shall be cancelled, from all over it."""
        plan, system = self._plan, life.system
        memory, disk = usage.memory(system.pids()), system.disk_bytes()
        every = max(plan.million // plan.cancel_count, 1)
        handles: list[bytes | str] = []
        sent, seconds = 0, 0.0
        while sent < plan.million and seconds < plan.send_limit_s:
            dues = later_ms(min(max(int(life.rate * CHUNK_S), 1), plan.million - sent))
            handles += life.send(dues)[1][::every]
            sent, seconds = sent + len(dues), seconds + len(dues) / life.rate
        life.rate = sent / seconds
        if "c" in self._works:
            self._tell.figure("c_volatile" if self._slow else "c_durable", life.rate)
        if sent < plan.million:
            self._tell.note("load", f"{sent:,} were sent within {plan.send_limit_s:g} s; these waited")
            self._tell.note("restart", f"with {sent:,} waiting: no more were sent within {plan.send_limit_s:g} s")
        if "d" in self._works:
            time.sleep(plan.settle_s)
            self._sync()  # a file has its blocks only then
            now = usage.memory(system.pids())
            self._tell.figure("d_count", sent)
            self._tell.figure("d_total", now.total / 1e6)
            # A collector of garbage may have given back more than they take.
            self._tell.figure("d_ram", max(now.held - memory.held, 0) / sent)
            self._tell.figure("d_mapped", max(now.total - memory.total, 0) / sent)
            self._tell.figure("d_disk", (system.disk_bytes() - disk) / sent)
        return handles[: plan.cancel_count]

    def _cancel(self, life: Life, handles: Sequence[bytes | str]) -> None:
        if not handles:
            raise NotFinished("there was nothing to cancel")
        limit_s = self._plan.cancel_limit_s
        answers: list[str] = []
        seconds, size = 0.0, CANCELS_FIRST
        while len(answers) < len(handles) and seconds < limit_s:
            start = time.perf_counter()
            answers += life.system.cancel(handles[len(answers) : len(answers) + size])
            seconds += time.perf_counter() - start
            size = max(int(len(answers) / seconds * CHUNK_S), 1)
        rate = len(answers) / seconds
        self._tell.figure("f_rate", rate)
        self._tell.figure("f_refused", len(answers) - answers.count(CANCELLED))
        if len(answers) < len(handles):
            self._tell.note("cancel", f"{len(answers):,} of {len(handles):,} were cancelled within {limit_s:g} s")
        count = min(self._plan.truth_count, max(int(rate * self._plan.truth_due_s / 2), 1))
        self._cancel_truth(life, count, [life.system.stranger(handle) for handle in handles[-count:]])

    def _cancel_truth(self, life: Life, count: int, strangers: Sequence[bytes | str]) -> None:
        """Every second one of some messages is cancelled in time, the others too late; strangers were never sent, and
        would still wait."""
        plan, system = self._plan, life.system
        due_ms = now_ms() + plan.truth_due_s * 1_000
        first, handles = life.send([int(due_ms)] * (2 * count))
        answers = system.cancel(handles[::2])
        if now_ms() > due_ms:
            raise NotFinished(f"{count} cancels took longer than {plan.truth_due_s:g} s: their truth is not known")
        promised = {2 * place for place, answer in enumerate(answers) if answer == CANCELLED}
        found = life.collect(first, 2 * count, due_ms, plan.receive_limit_s, 2 * count - len(promised))
        more = life.collect(first, 2 * count, now_ms(), plan.leak_wait_s)
        self._tell.figure("f_leaked", len(promised & {*found.indexes.tolist(), *more.indexes.tolist()}))
        delivered = [handles[place] for place in found.indexes if place % 2]
        self._tell.figure("f_delivered", system.cancel(delivered).count(CANCELLED))
        self._tell.figure("f_strangers", system.cancel(strangers).count(CANCELLED))

    def _restart(self, life: Life) -> None:
        """Killed while one more message waits, which is due when the system comes back."""
        system, limit_s = life.system, self._plan.restart_limit_s
        due_ms = now_ms() + 1_000
        first, _ = life.send([due_ms])
        system.kill()
        self._sync()
        time.sleep(max(due_ms - now_ms(), 0) / 1_000)
        start_ms = time.time_ns() / 1e6
        system.start()
        life.send(later_ms(1))
        self._tell.figure("e_send", (time.time_ns() / 1e6 - start_ms) / 1_000)
        found = life.collect(first, 1, now_ms(), limit_s)
        if not len(found.at_ms):
            raise NotFinished(f"the message that was due was not received within {limit_s:g} s")
        self._tell.figure("e_delivery", float(found.at_ms[0] - start_ms) / 1_000)

    def _million(self, life: Life) -> None:
        plan, system, count = self._plan, life.system, self._plan.million
        memory, visible_before = usage.memory(system.pids()), _visible(system)
        first, at_ms = life.send_ahead(np.zeros(count, np.int64), self._million_limit_s)
        if "d" in self._works:
            self._tell.figure("d_near_ram", max(usage.memory(system.pids()).held - memory.held, 0) / count)
        if visible_before is not None:
            self._tell.figure("b_visible", self._visible_s(system, visible_before + count, at_ms))
        found = life.collect(first, count, at_ms, plan.receive_limit_s)
        self._tell_span("", "b_million_last", found, count, at_ms)

    def _visible_s(self, system: System, wanted: int, at_ms: float) -> float:
        time.sleep(max(at_ms - now_ms() - 20, 0) / 1_000)
        while (visible := system.visible()) < wanted:
            if now_ms() > at_ms + self._plan.receive_limit_s * 1_000:
                raise NotFinished(
                    f"not finished within {self._plan.receive_limit_s:g} s: {wanted - visible:,} were not visible"
                )
            time.sleep(POLL_S)
        return (time.time_ns() / 1e6 - at_ms) / 1_000

    def _durable_sends(self, life: Life) -> None:
        life.send([now_ms() + HOUR_MS] * max(int(life.rate * SLOW_S), 1))
        self._tell.figure("c_durable", life.rate)

    def _volatile(self, life: Life) -> None:
        """Half as many come first, as a load came before the others: a JVM is not quick at once."""
        life.send(later_ms(self._plan.volatile_count // 2))
        life.send(later_ms(self._plan.volatile_count))
        self._tell.figure("c_volatile", life.rate)


def _start(life: Life) -> None:
    life.system.start()


def _visible(system: System) -> int | None:
    """None for a system that does not tell; then its consumer is waited for alone."""
    try:
        return system.visible()
    except NotRun:
        return None


def later_ms(count: int) -> list[int]:
    """Due times of messages that only wait: all over the hour after the next, in no order, as users' are."""
    from_ms = now_ms() + HOUR_MS
    return [from_ms + place * STRIDE_MS % HOUR_MS for place in range(count)]


def now_ms() -> int:
    return time.time_ns() // 1_000_000
