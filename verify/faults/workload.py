"""The clients that use the broker during the faults: producers with every form of delay, cancels that race the due
instant, moves to other due times, consumers of every kind that come and go and send some messages back, jobs and
imports.

Each client is a thread that runs until it is stopped. It replaces a connection that ends; what was in flight on it
stays in doubt. No client sends a message twice, so that the messages in the queues can be counted, except those with an
id, which the broker stores once.
"""

import heapq
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from verify.faults.driver import (
    Answer,
    Cancel,
    Consumer,
    Delivery,
    Driver,
    Form,
    Hung,
    Lost,
    Move,
    Moved,
    Producer,
    Sent,
    Wish,
)
from verify.faults.history import History, now_ms

AGAIN_S = 0.1
LOOK_S = 1.0  # between two looks at what a client waits for
# A client that is to end may wait for a job, which waits for other jobs and for the pipeline. Without any progress:
# longer than Spark takes to start on a busy machine, than the pipeline pauses between two tries, than one step of a job
# takes, and than an import is tried again. With progress: there are few jobs, and each takes minutes at most.
IDLE_S, JOIN_S = 600.0, 3_600.0
AGENDA_MAX = 2_000  # cancels, or moves, that wait for their instant
RACERS = 2
RACE_MS = 30  # around the due instant
MOVES_MAX = 3  # of one message
REPEATERS, REPEATS_MAX = 2, 4  # clients that send the same ids, and how often one id is sent
PLAN_SHARE = 0.05  # of the looks of a repeater, 50 a second
REPEAT_MS = 20_000  # within which it is sent again: longer than the broker takes to start
LEAD_MS = 60_000  # what is due later waits elsewhere
IMPORTED_MOVES = 20  # messages of an import that are moved
GROUP_SIZE = 30
BROUGHT = 2_000

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """How many clients, and how long the delays are. Delays are drawn on a logarithmic scale: most are short."""

    producers: int = 3
    consumers: int = 2  # of each kind
    pause_s: float = 0.1
    delay_ms_max: int = 240_000
    distant_ms: tuple[int, int] = (50 * 3_600_000, 80 * 3_600_000)  # of a few, in other files of the table
    distant_share: float = 0.02
    moved_share: float = 0.1  # of the messages whose due time is known
    with_jobs: bool = True
    with_imports: bool = True
    with_table: bool = False  # imports one after the other, postponements, and jobs that take minutes


class Hand(threading.Thread, ABC):
    """A client thread: uses the broker again and again until it is stopped."""

    def __init__(self, name: str, seed: int, driver: Driver, history: History) -> None:
        super().__init__(name=name, daemon=True)
        self.random = random.Random(f"{seed} {name}")
        self.driver, self.history = driver, history
        self.stopping = threading.Event()
        self.mistake: BaseException | None = None
        self.connection: Producer | Consumer | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                try:
                    self.visit()
                except Lost:
                    self.stopping.wait(AGAIN_S)
        except BaseException as mistake:
            self.mistake = mistake

    @abstractmethod
    def visit(self) -> None:
        """Works for a while, or until the connection ends. Raises Lost."""

    def drop(self) -> None:
        """Cuts its connection, as a broken cable does."""
        if self.connection is not None:
            self.connection.drop()


class Maker(Hand):
    """A client that makes messages with every form of delay."""

    def __init__(self, name: str, seed: int, driver: Driver, history: History, load: Load) -> None:
        super().__init__(name, seed, driver, history)
        self.load = load
        self._count = 0

    def wish(self, prefix: str = "") -> Wish:
        self._count += 1
        key, form = f"{prefix or self.name}-{self._count}", self.random.choice(list(Form))
        is_distant = self.random.random() < self.load.distant_share
        near_ms = int(self.load.delay_ms_max ** self.random.uniform(0.3, 1))
        span_ms = self.random.randrange(*self.load.distant_ms) if is_distant else near_ms
        if form is Form.NONE:
            return Wish(key, form)
        if form is Form.LEVEL:
            level = self.random.choice(list(self.driver.levels_ms))
            return Wish(key, form, level, self.driver.levels_ms[level])
        if form is Form.SECONDS:
            seconds = max(span_ms // 1_000, 1)
            return Wish(key, form, seconds, seconds * 1_000)
        if form is Form.SPAN:
            return Wish(key, form, span_ms, span_ms)
        return self.timed(key, span_ms)

    def timed(self, key: str, span_ms: int) -> Wish:
        return Wish(key, Form.INSTANT, self.history.broker_ms() + span_ms)


class Sender(Maker):
    """Sends several messages at a time, alone or as a batch; cancels some at once and some when they are due, and has
    others moved.
    """

    def __init__(
        self, name: str, seed: int, driver: Driver, history: History, load: Load, races: "Sequence[Agenda[Race]]",
        tours: "Agenda[Tour]",
    ) -> None:  # fmt: skip
        super().__init__(name, seed, driver, history, load)
        self._races, self._tours = races, tours

    def visit(self) -> None:
        self.connection = connection = self.driver.producer()
        try:
            while not self.stopping.is_set() and self._send(connection):
                self.stopping.wait(self.random.uniform(0, 2 * self.load.pause_s))
        finally:
            connection.close()

    def _send(self, connection: Producer) -> bool:
        """Sends once; returns whether the connection can still be used."""
        wishes = [self.wish() for _ in range(self.random.randrange(1, 16))]
        is_batch = self.random.random() < 0.2
        self.history.note_sending(wishes, self.name)
        answers = (connection.send_batch if is_batch else connection.send)(wishes)
        self.history.note_sent(wishes, answers)
        kept = [pair for pair in zip(wishes, answers, strict=True) if pair[1].handle]
        for wish, answer in kept:
            dice = self.random.random()
            if dice < 0.1 and self._cancel(connection, wish, answer) is Cancel.IN_DOUBT:
                return False
            for races in self._races if 0.1 < dice < 0.25 else ():
                races.add(answer.due_at_ms, Race(wish, answer))
            if 0.25 < dice < 0.25 + self.load.moved_share:
                tour = Tour(wish, answer, answer.due_at_ms, self.random.randrange(MOVES_MAX) + 1)
                self._tours.add(tour.choose_instant(self.history.broker_ms(), self.random), tour)
        return all(answer.outcome is not Sent.IN_DOUBT for answer in answers)

    def _cancel(self, connection: Producer, wish: Wish, answer: Answer) -> Cancel:
        return cancel(self.history, connection, wish, answer, self.random.randrange(3), self.name)


def cancel(
    history: History, connection: Producer, wish: Wish, answer: Answer, way: int, client: str,
    may_be_moved: bool = False,
) -> Cancel:  # fmt: skip
    began = history.note_cancelling(wish.key, client)
    outcome = (connection.cancel_moved if may_be_moved else connection.cancel)(wish, answer, way)
    history.note_cancelled(wish.key, began, outcome)
    return outcome


class Race(NamedTuple):
    """A message that is to be cancelled around an instant, usually that at which it is due."""

    wish: Wish
    answer: Answer
    may_be_moved: bool = False


class Tour(NamedTuple):
    """A message that is to be moved, once or several times."""

    wish: Wish
    answer: Answer
    due_at_ms: int
    left: int  # this many moves

    def choose_instant(self, now_ms: int, dice: random.Random) -> int:
        """When to move it: mostly soon, or around the instant at which it is due."""
        if dice.random() < 0.2:
            return self.due_at_ms
        return now_ms + int(max(self.due_at_ms - now_ms, 2) ** dice.uniform(0, 1))

    def choose_due(self, now_ms: int, load: Load, dice: random.Random) -> int:
        """Where to move it: now (0), to about now, to a time before or after its lead, days ahead, nearer, farther, or
        back to its first due time.
        """
        targets = (
            0,
            now_ms + dice.randrange(-RACE_MS, 3 * RACE_MS),
            now_ms + dice.randrange(1_000, LEAD_MS),
            now_ms + dice.randrange(LEAD_MS, max(load.delay_ms_max, LEAD_MS + 1_000)),
            now_ms + dice.randrange(*load.distant_ms),
            now_ms + max(self.due_at_ms - now_ms, 2) // 2,
            self.due_at_ms + dice.randrange(1, 10_000),
            self.wish.value if self.wish.form is Form.INSTANT else self.answer.due_at_ms,
        )
        return dice.choices(targets, (10, 15, 20, 20, 2, 10, 15, 8))[0]


class Agenda(Generic[T]):
    """What is to be done, each thing at its instant."""

    def __init__(self, history: History) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._count = 0  # decides between equal instants
        self._lock = threading.Lock()
        self._history = history

    def add(self, at_ms: int, task: T) -> None:
        with self._lock:
            if len(self._heap) < AGENDA_MAX:
                self._count += 1
                heapq.heappush(self._heap, (at_ms, self._count, task))

    def due(self) -> list[T]:
        """Takes out what is to be done about now."""
        with self._lock:
            limit, found = self._history.broker_ms() + RACE_MS, []
            while self._heap and self._heap[0][0] <= limit:
                found.append(heapq.heappop(self._heap)[2])
            return found


class Repeat(NamedTuple):
    """A message that is to be stored once, and is sent several times."""

    wish: Wish
    attempt: int


class Repeats:
    """What several clients send under the same ids."""

    def __init__(self, history: History) -> None:
        self.agendas = [Agenda[Repeat](history) for _ in range(REPEATERS)]
        self._answered: set[str] = set()
        self._lock = threading.Lock()

    def is_first(self, key: str) -> bool:
        """Notes that one of the sends has its receipt; returns whether it is the first of them."""
        with self._lock:
            is_first = key not in self._answered
            self._answered.add(key)
            return is_first


class Repeater(Maker):
    """Sends messages with an id, each of them several times, now and later, as others do: on several connections, after
    crashes, and when it was moved or cancelled.
    """

    def __init__(
        self, name: str, seed: int, driver: Driver, history: History, load: Load, repeats: Repeats, number: int,
        races: "Sequence[Agenda[Race]]", tours: Agenda[Tour],
    ) -> None:  # fmt: skip
        super().__init__(name, seed, driver, history, load)
        self._repeats, self._own = repeats, repeats.agendas[number]
        self._races, self._tours = races, tours

    def visit(self) -> None:
        self.connection = connection = self.driver.producer()
        try:
            while not self.stopping.wait(0.02):
                if self.random.random() < PLAN_SHARE:
                    self._plan()
                for repeat in self._own.due():
                    if not self._send(connection, repeat):
                        return
        finally:
            connection.close()

    def _plan(self) -> None:
        wish, dice = self.wish(), self.random
        self.history.note_sending([wish], self.name)
        now_ms = self.history.broker_ms()
        for attempt in range(dice.randrange(2, REPEATS_MAX + 1)):
            at_ms = now_ms + dice.choice((0, 0, dice.randrange(REPEAT_MS)))
            dice.choice(self._repeats.agendas).add(at_ms, Repeat(wish, attempt))

    def _send(self, connection: Producer, repeat: Repeat) -> bool:
        """Sends once; returns whether the connection can still be used."""
        wish = repeat.wish
        answer = connection.send_once(wish, repeat.attempt)
        if answer.outcome is Sent.ACKNOWLEDGED:
            is_first = self._repeats.is_first(wish.key)
            self.history.note_once(wish, answer, is_first)
            if is_first and answer.handle:
                self._go_on(wish, answer)
        return answer.outcome is not Sent.IN_DOUBT

    def _go_on(self, wish: Wish, answer: Answer) -> None:
        """Plans a cancel for some of them, and moves for others."""
        now_ms, dice = self.history.broker_ms(), self.random
        choice = dice.random()
        for races in self._races if choice < 0.2 else ():
            races.add(dice.choice((now_ms, answer.due_at_ms)), Race(wish, answer, may_be_moved=True))
        if 0.2 < choice < 0.4:
            tour = Tour(wish, answer, answer.due_at_ms, dice.randrange(MOVES_MAX) + 1)
            self._tours.add(tour.choose_instant(now_ms, dice), tour)


class Racer(Hand):
    """Cancels messages around the instant at which they are due. Two of them race for the same ones."""

    def __init__(self, name: str, seed: int, driver: Driver, history: History, races: Agenda[Race]) -> None:
        super().__init__(name, seed, driver, history)
        self._races = races

    def visit(self) -> None:
        self.connection = connection = self.driver.producer()
        try:
            while not self.stopping.wait(0.005):
                for wish, answer, may_be_moved in self._races.due():
                    self.stopping.wait(self.random.uniform(0, 2 * RACE_MS) / 1_000)
                    way = self.random.randrange(3)
                    outcome = cancel(self.history, connection, wish, answer, way, self.name, may_be_moved)
                    if outcome is Cancel.IN_DOUBT:
                        return
        finally:
            connection.close()


class Mover(Hand):
    """Moves messages, some of them several times. Has some cancelled with the first handle, during the moves and after
    them.
    """

    def __init__(
        self, name: str, seed: int, driver: Driver, history: History, load: Load, races: Sequence[Agenda[Race]],
        tours: Agenda[Tour],
    ) -> None:  # fmt: skip
        super().__init__(name, seed, driver, history)
        self._load, self._races, self._tours = load, races, tours

    def visit(self) -> None:
        self.connection = connection = self.driver.producer()
        try:
            while not self.stopping.wait(0.005):
                for tour in self._tours.due():
                    if self._move(connection, tour).outcome is Moved.IN_DOUBT:
                        return
        finally:
            connection.close()

    def _move(self, connection: Producer, tour: Tour) -> Move:
        """Moves a message once, and plans what becomes of it then. One whose last move is in doubt is moved no more:
        the broker may still do that at any time.
        """
        wish, answer, dice = tour.wish, tour.answer, self.random
        if dice.random() < 0.1:
            self._plan_cancel(tour, self.history.broker_ms())
        target = tour.choose_due(self.history.broker_ms(), self._load, dice)
        began = self.history.note_moving(wish.key, target, self.name)
        moved = connection.move(wish, answer, target, dice.randrange(3))
        self.history.note_moved(wish.key, began, target, moved)
        now_ms = self.history.broker_ms()
        tour = tour._replace(due_at_ms=moved.due_at_ms or tour.due_at_ms, left=tour.left - 1)
        if tour.left and moved.outcome in (Moved.MOVED, Moved.REFUSED):
            self._tours.add(tour.choose_instant(now_ms, dice), tour)
        elif dice.random() < 0.4:
            self._plan_cancel(tour, dice.choice((now_ms, tour.due_at_ms)))
        return moved

    def _plan_cancel(self, tour: Tour, at_ms: int) -> None:
        for races in self._races:
            races.add(at_ms, Race(tour.wish, tour.answer, may_be_moved=True))


class Reader(Hand):
    """A member of a group that comes and goes, acknowledges nearly everything and sends some messages back."""

    def __init__(self, kind: str, number: int, seed: int, driver: Driver, history: History) -> None:
        super().__init__(f"{kind}{number}", seed, driver, history)
        self._kind = kind

    def visit(self) -> None:
        self.connection = connection = self.driver.consumer(self._kind)
        end = now_ms() + self.random.uniform(2_000, 10_000)
        try:
            while not self.stopping.is_set() and now_ms() < end:
                read(self._kind, connection, self.history, self.random, 0.97)
        finally:
            connection.close()


def read(kind: str, connection: Consumer, history: History, dice: random.Random, share: float) -> int:
    """Receives once and acknowledges a share of the messages; returns how many there were."""
    asked_at = now_ms()
    deliveries = connection.receive()
    history.note_deliveries(kind, deliveries, asked_at)
    if share < 1 and deliveries and deliveries[0].attempt < 2 and dice.random() < 0.03:
        _send_back(kind, connection, history, deliveries[0])
    kept = [each for each in deliveries if dice.random() < share]
    for delivery, is_done in zip(kept, connection.acknowledge(kept), strict=True):
        if is_done:
            history.note("done", group=kind, key=delivery.key)
    return len(deliveries)


def _send_back(kind: str, connection: Consumer, history: History, delivery: Delivery) -> None:
    history.note("back", group=kind, key=delivery.key)
    if connection.send_back(delivery):
        history.note("backed", group=kind, key=delivery.key)


class Cleaner(Maker):
    """Sends messages that wait for long, then cancels all of them by one job."""

    def visit(self) -> None:
        if self.stopping.wait(self.random.uniform(5, 20)):
            return
        self._count += 1
        group = f"{self.name}{self._count}"
        wishes = [self.timed(f"{group}x{number}", self.load.delay_ms_max) for number in range(GROUP_SIZE)]
        connection = self.driver.producer()
        try:
            self.history.note_sending(wishes, self.name, group)
            answers = connection.send(wishes)
            self.history.note_sent(wishes, answers)
        finally:
            connection.close()
        if all(answer.outcome is not Sent.IN_DOUBT for answer in answers):
            changed = self.driver.cancel_where(f"{group}x")
            self.history.note("job", group=group, changed=changed)


class Importer(Maker):
    """Imports many messages from a file, some of them due at the same instant. Postpones some of the imports, and has a
    few messages moved by their keys, some of them while a job postpones them.
    """

    def __init__(
        self, name: str, seed: int, driver: Driver, history: History, load: Load, tours: Agenda[Tour]
    ) -> None:  # fmt: skip
        super().__init__(name, seed, driver, history, load)
        self._tours = tours

    def visit(self) -> None:
        self._count += 1
        due = self.history.broker_ms() + self.load.delay_ms_max
        name, dice = f"{self.name}{self._count}", self.random
        earlier = [dice.choice((0, 0, dice.randrange(self.load.delay_ms_max // 2))) for _ in range(BROUGHT)]
        wishes = [Wish(f"{name}x{number}", Form.INSTANT, due - by) for number, by in enumerate(earlier)]
        self.history.note_sending(wishes, self.name)
        outcome = Sent.ACKNOWLEDGED if self.driver.import_messages(wishes) else Sent.IN_DOUBT
        self.history.note_sent(wishes, [Answer(outcome)] * len(wishes))
        is_moved_first = dice.random() < 0.3
        if is_moved_first:
            self._plan_moves(wishes)
        if self.load.with_table and dice.random() < 0.5:
            by_ms = dice.randrange(self.load.delay_ms_max // 4, self.load.delay_ms_max)
            self.history.note_postponing(f"{name}x", by_ms)
            changed = self.driver.postpone_where(f"{name}x", by_ms)
            self.history.note_postponed(f"{name}x", by_ms, changed)
        if not is_moved_first:
            self._plan_moves(wishes)
        if not self.load.with_table:
            self.stopping.wait(60)

    def _plan_moves(self, wishes: Sequence[Wish]) -> None:
        for wish in self.random.sample(wishes, IMPORTED_MOVES):
            tour = Tour(wish, Answer(Sent.ACKNOWLEDGED), wish.value, self.random.randrange(MOVES_MAX) + 1)
            self._tours.add(tour.choose_instant(self.history.broker_ms(), self.random), tour)


class Asker(Maker):
    """Asks for jobs that take minutes, and withdraws half of them."""

    def visit(self) -> None:
        if self.stopping.wait(self.random.uniform(5, 40)):
            return
        self._count += 1
        is_withdrawn = self.random.random() < 0.5
        name = f"{self.name}-{self._count}"
        self.history.note("long job", name=name, is_withdrawn=is_withdrawn)
        self.driver.run_long_job(name, self.random.uniform(2, 60) if is_withdrawn else None)


class Crew:
    """All clients of an episode."""

    def __init__(self, driver: Driver, history: History, load: Load, seed: int) -> None:
        races, tours = [Agenda[Race](history) for _ in range(RACERS)], Agenda[Tour](history)
        repeats = Repeats(history)
        common = (seed, driver, history)
        self._driver = driver
        self.makers: list[Hand] = [
            Sender(f"p{number}", *common, load, races, tours) for number in range(load.producers)
        ]
        self.makers += [
            Repeater(f"once{number}", *common, load, repeats, number, races, tours) for number in range(REPEATERS)
        ]
        self.makers.append(Mover("mover", *common, load, races, tours))
        self.makers += [Racer(f"racer{number}", *common, own) for number, own in enumerate(races)]
        if load.with_jobs:
            self.makers.append(Cleaner("job", *common, load))
        if load.with_imports:
            self.makers.append(Importer("import", *common, load, tours))
        if load.with_table:
            self.makers.append(Asker("long", *common, load))
        self.readers: list[Hand] = [
            Reader(kind, number, *common) for kind in driver.consumer_kinds for number in range(load.consumers)
        ]

    def start(self) -> None:
        for hand in (*self.makers, *self.readers):
            hand.start()

    def drop(self, dice: random.Random) -> None:
        """Cuts the connections of half of them."""
        for hand in (*self.makers, *self.readers):
            if dice.random() < 0.5:
                hand.drop()

    def stop_makers(self) -> None:
        stop(self.makers, self._driver)

    def stop_readers(self) -> None:
        stop(self.readers, self._driver)


def stop(hands: Sequence[Hand], driver: Driver) -> None:
    """Stops clients. Raises the first exception of one of them, which is a mistake of the suite, and Hung where one
    waits for a broker that makes no progress.
    """
    for hand in hands:
        hand.stopping.set()
    for hand in hands:
        _await_end(hand, driver)
        if hand.mistake is not None:
            raise hand.mistake


def _await_end(hand: Hand, driver: Driver) -> None:
    """Waits for a client as long as the broker makes progress. Raises Hung."""
    began_s = moved_s = time.monotonic()
    last = ""
    while True:
        hand.join(LOOK_S)
        if not hand.is_alive():
            return
        seen, now_s = _progress(driver), time.monotonic()
        if seen != last:
            last, moved_s = seen, now_s
        if now_s - moved_s > IDLE_S:
            raise Hung(f"{hand.name} does not end, and nothing has moved for {IDLE_S:.0f} s: {seen}")
        if now_s - began_s > JOIN_S:
            raise Hung(f"{hand.name} does not end within {JOIN_S:.0f} s: {seen}")


def _progress(driver: Driver) -> str:
    try:
        return driver.progress()
    except Lost as error:
        return f"the broker does not answer: {error}"
