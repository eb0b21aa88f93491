"""One run of a history: a broker on a virtual disk and a manual clock, two pipelines, a model that watches.

A history is a list of Ops: a verb and whole numbers. Every verb can stand anywhere in a history, so that a failing
one can be shortened by leaving ops out. Whatever is random inside an op comes from its numbers, never from outside.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from postdate import message as messages
from postdate.broker import Broker
from postdate.cancels import Traced
from postdate.check import check_folder
from postdate.clock import ManualClock
from postdate.config import Settings
from postdate.errors import CorruptLog, DiskFull, FlowControl, LogFailed, Refused
from postdate.far import FAR
from postdate.keys import key_hash
from postdate.log import record as records
from postdate.log.batch import MESSAGE
from postdate.log.log import Log
from postdate.log.segment import SPARE_COUNT, Segments
from postdate.lookup import Found, State
from postdate.message import Cancelled, Message, encode_properties
from postdate.reader import PullStatus
from postdate.simulation.disk import Killed, VirtualDisk
from postdate.simulation.model import Asked, Broken, Model, Sent
from postdate.simulation.owners import Owners
from postdate.simulation.pipeline import SimulatedPipeline, SimulatedTable, TableRow
from postdate.simulation.poppers import DEAD_LETTERS, Poppers
from postdate.staging import Stage, Verified
from postdate.table_format import OWN, own_arrival
from postdate.wheel import NEVER
from postdate.writer import Ticket

START_MS = 1_700_000_000_000
TOPICS = ("orders", "mails")
NONE: frozenset[str] = frozenset()
OTHER_KEY = "other"  # the second user key of every message that is not sent again
SETTINGS = Settings(
    segment_bytes=16 * 1024,
    batch_bytes_max=16 * 1024,
    unflushed_bytes_max=16 * 1024,
    lead_ms=5_000,
    rescue_step_ms=1_000,
    retention_ms=30_000,
    queue_file_rows=64,
    queue_tail_rows=4,
    far_block_rows=8,
    rows_by_column=6,
    message_delay_level="1s 3s 10s 1m",
)


class Op(NamedTuple):
    verb: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb}({', '.join(map(str, self.numbers))})"


class World:
    """Runs ops one after another; raises model.Broken where a promise is broken."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.disk = VirtualDisk()
        self.clock = ManualClock(START_MS)
        self.model = Model(clock_max=START_MS)
        self.table = SimulatedTable()
        self.pipelines = [SimulatedPipeline(self.disk, self.table) for _ in range(2)]
        self._staged: set[str] = set()  # chunks that the broker has ever taken
        self._last_stage: Stage | None = None
        self._begun: tuple[Stage, Verified] | None = None  # its chunks are read, its record is not written
        self._asking: list[tuple[Traced, Asked]] = []  # cancels that wait for what the table has
        self.poppers = Poppers()
        self.owners = Owners(self.table)
        self.broker: Broker | None = None
        self._made = 0
        self._sends: list[tuple[Ticket, list[Sent]]] = []  # not answered yet
        self._cancels: list[tuple[Ticket, Asked]] = []
        self._sending: list[Sent] = []  # inside the call
        self._cancelling: Asked | None = None
        self._end_before = 0
        self._spoilt: set[str] = set()  # snapshots that went bad: the check may say so
        self._position_before = 0
        self._verbs: dict[str, Callable[..., None]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }
        self._start()

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, op: Op) -> None:
        self._end_before = self._broker().log.end
        try:
            self._verbs[op.verb](*op.numbers)
            self._keep_spares()
        except Killed:
            self._crash(power_seed=None)
        except LogFailed:
            self._crash(power_seed=None)  # an operator restarts a broker that takes no more writes
        self.look()

    def _keep_spares(self) -> None:
        """What the helper thread of a running broker does."""
        try:
            while self._broker().log.spare_count < SPARE_COUNT:
                self._broker().log.prepare_segment()
        except (DiskFull, OSError):
            return

    def _broker(self) -> Broker:
        assert self.broker is not None, "the world always has a running broker between ops"
        return self.broker

    def _start(self) -> None:
        """Opens the broker, again and again where the opening itself is killed."""
        while self.broker is None:
            try:
                self.broker = Broker(self.disk, self.settings)
            except (Killed, LogFailed):
                self.disk.kill()
        for topic in TOPICS:
            if topic not in self.broker.fold.topics.by_name:
                self.broker.put_topic(topic, self.clock.now_ms(), read_queue_count=2, write_queue_count=2)
        if DEAD_LETTERS not in self.broker.fold.topics.by_name:
            self.broker.put_topic(DEAD_LETTERS, self.clock.now_ms(), read_queue_count=1, write_queue_count=1)

    def _crash(self, power_seed: int | None, then: Callable[[], None] | None = None) -> None:
        """The broker is gone; `then` is what else happens before it comes back."""
        self.broker = None
        self.poppers.doubt()
        self.owners.doubt()
        for pipeline in self.pipelines:
            pipeline.doubt()
        if power_seed is None:
            self.disk.kill()
        else:
            self.disk.lose_power(random.Random(power_seed))
        self._check_folder()
        if then is not None:
            then()
        self._start()
        self._settle_doubts()
        self.look(everything=True)

    def _settle_doubts(self) -> None:
        """After a crash: what was not answered either is in the log or never was."""
        for ticket, batch in self._sends:
            for message in batch:
                message.exists = self._is_in_log(message.arrival, message.name, ticket.end)
                message.acknowledged = message.exists
        self._sends.clear()
        self._settle_calls()
        for _, asked in (*self._cancels, *self._asking):
            self.model.unanswered(asked)
        self._cancels.clear()
        self._asking.clear()
        for message in self.model.messages.values():
            if message.acknowledged and self._broker().log.end <= message.arrival < OWN:
                raise Broken(
                    f"{message.name} was acknowledged at {message.arrival}, the log ends at {self._broker().log.end}"
                )

    def _settle_calls(self) -> None:
        """The process died inside a call: what it was about is in the log or not."""
        if self._cancelling is not None:
            self.model.unanswered(self._cancelling)
            self._cancelling = None
        if self._sending:
            places = self._bodies_in_log()
            for sent in self._sending:
                sent.arrival = places.get(sent.name, NEVER)
                sent.exists = sent.acknowledged = sent.arrival != NEVER
                self.model.sent(sent)
            self._sending = []

    def _bodies_in_log(self) -> dict[str, int]:
        log = Log(self.disk, Segments(self.disk, self.settings.segment_bytes), self.settings.unflushed_bytes_max)
        places = {}
        for batch in log.scanned(self._end_before, 0):
            for row in batch.array():
                offset = batch.offset + int(row["position"])
                places[records.decode(log.read(offset, int(row["size"]))).body.decode()] = offset
        return places

    def _is_in_log(self, offset: int, name: str, end: int) -> bool:
        if end > self._broker().log.end:
            return False
        data = self._broker().log.read(offset, 4)
        try:
            return records.decode(self._broker().log.read(offset, int.from_bytes(data, "big"))).body == name.encode()
        except CorruptLog:
            return False  # other bytes stand there now

    # -- looking ------------------------------------------------------------------------------------------------

    def look(self, *, everything: bool = False) -> None:
        """What clients see: answers, and every queue as a consumer reads it."""
        self._collect_answers()
        broker = self._broker()
        self.owners.collect(broker, self.model)
        self._check_table(broker)
        for number, (topic, queue_id) in enumerate(broker.fold.topics.places):
            if topic in TOPICS and broker.fold.topics.by_name.get(topic) is not None:
                topic_numbers = broker.fold.topics.by_name[topic].numbers
                if queue_id < len(topic_numbers) and topic_numbers[queue_id] == number:
                    self._look_at(topic, queue_id, number, everything)
        self.owners.judge(self.model)
        self._position_before = broker.fold.position

    def _look_at(self, topic: str, queue_id: int, number: int, everything: bool) -> None:
        broker = self._broker()
        low, high = broker.offsets(topic, queue_id)
        self.model.shorter(number, high)
        offset = low if everything else max(low, len(self.model.shown.get(number, [])))
        if offset > len(self.model.shown.get(number, [])):
            raise Broken(
                f"queue {number} begins at {offset}, a consumer has read only up to {len(self.model.shown[number])}"
            )
        while offset < high:
            pulled = broker.pull(topic, queue_id, offset, count_max=7)
            if pulled.status is not PullStatus.FOUND:
                if pulled.next_offset <= offset:
                    raise Broken(f"a pull of queue {number} at {offset} gives {pulled.status} and does not move on")
                offset = pulled.next_offset
                continue
            for data in pulled.records:
                record = records.decode(data)
                self.model.look(number, record.queue_offset, [record.body.decode()], self._position_before)
            offset = pulled.next_offset

    def _check_table(self, broker: Broker) -> None:
        """The fold knows how many rows the table must hold: that is how a pipeline proves that it holds them."""
        far = broker.fold.far
        expected, held = far.rows_in - far.rows_out, len(self.table.waiting(broker))
        if expected != held:
            raise Broken(f"the table holds {held} rows that wait, the broker says {expected}")

    def _collect_answers(self) -> None:
        for ticket, batch in self._sends:
            if ticket.answers is not None:
                for message in batch:
                    message.acknowledged = True
        self._sends = [(ticket, batch) for ticket, batch in self._sends if ticket.answers is None]
        self.poppers.collect(self.model.clock_max)

    # -- producers ----------------------------------------------------------------------------------------------

    def do_send(self, form: int, amount: int, key: int, place: int, count: int) -> None:
        """`form` is how the delay is asked for, `place` chooses topic and queue, `key` a user key that others use
        too.
        """
        broker, now = self._broker(), self.clock.now_ms()
        topic = TOPICS[place % len(TOPICS)]
        queue_id = place // len(TOPICS) % broker.fold.topics.get(topic).write_queue_count
        batch = [self._message(form, amount + index, key, topic, queue_id, now) for index in range(count)]
        self._send(batch, now)

    def _send(self, batch: list[Message], now: int) -> None:
        self._sending = [self._sent(message, now) for message in batch]
        try:
            ticket = self._broker().send(batch, now)
        except (DiskFull, FlowControl):
            self._sending = []
            return
        for sent, offset in zip(self._sending, ticket.offsets, strict=True):
            sent.arrival = offset
            self.model.sent(sent)
        self._sends.append((ticket, self._sending))
        self._sending = []

    def _message(self, form: int, amount: int, key: int, topic: str, queue_id: int, now: int) -> Message:
        self._made += 1
        properties = {"UNIQ_KEY": f"U{self._made}", "KEYS": f"k{key} {OTHER_KEY}"}
        properties |= _delay(form, amount, now)
        return Message(topic, f"m{self._made}".encode(), encode_properties(properties), queue_id)

    def _sent(self, message: Message, now: int) -> Sent:
        properties = messages.decode_properties(message.properties)
        levels = messages.DelayLevels.parse(self.settings.message_delay_level)
        due = messages.due(properties, now, levels, self.settings.delay_ms_max).at_ms
        name, near = message.body.decode(), due <= now + self.settings.lead_ms
        key, _, other = properties["KEYS"].partition(" ")
        return Sent(name, message.topic, message.queue_id, properties["UNIQ_KEY"], key, due, now, near, other_key=other)

    def do_resend(self, pick: int) -> None:
        """A producer that saw no answer sends the same message again, with the same unique key and due."""
        if not self.model.messages:
            return
        first = list(self.model.messages.values())[pick % len(self.model.messages)]
        if not first.due or first.topic not in self._broker().fold.topics.by_name:
            return
        self._made += 1
        properties = {
            "UNIQ_KEY": first.unique_key,
            "KEYS": first.user_key,
            "TIMER_DELIVER_MS": str(first.due),
        }
        message = Message(first.topic, f"m{self._made}".encode(), encode_properties(properties), 0)
        self._send([message], self.clock.now_ms())

    def do_cancel(self, pick: int, variant: int) -> None:
        """Variants: by unique key, by user key, with a wrong due, of a message that is still to come, with the due that
        a job has given it. The others have its handle, with its first due.
        """
        if not self.model.messages:
            return
        target = list(self.model.messages.values())[pick % len(self.model.messages)]
        due = target.due if variant == 4 else target.first_due + (1 if variant == 2 else 0)
        if not target.due or target.topic not in self._broker().fold.topics.by_name:
            return
        by = "key" if variant == 1 else "unique"
        key = f"U{self._made + 1 + pick % 3}" if variant == 3 else target.user_key if by == "key" else target.unique_key
        asked = self._cancelling = Asked(target.topic, key, by, due, NEVER)
        try:
            ticket = self._broker().cancel(target.topic, key, due, self.clock.now_ms(), by=by)
        except (DiskFull, FlowControl):
            self._cancelling = None
            return
        asked.arrival, self._cancelling = ticket.offsets[0], None
        self.model.cancels.append(asked)
        self._cancels.append((ticket, asked))
        self.look()  # an async broker has fired what was due before it answered
        self.model.followed(asked)
        self._answer_cancels()

    def _answer_cancels(self) -> None:
        """Called right after a settle, before anybody looks: an answer is about that moment."""
        held = self.table.held_names(self._broker())
        for ticket, asked in self._cancels:
            if ticket.answers is not None:
                self._answer_cancel(ticket.answer, asked, held)
        self._cancels = [(ticket, asked) for ticket, asked in self._cancels if ticket.answers is None]

    def _answer_cancel(self, traced: Traced, asked: Asked, held: frozenset[str]) -> None:
        asked.jobs = traced.tombstone.jobs
        if not traced.may_be_in_table:
            hidden = self.owners.on_way(self._broker()) | (held if traced.outcome is Cancelled.DELIVERED else NONE)
            self.model.answered(asked, traced.outcome, in_table=hidden)
            return
        self.model.applied(asked)
        self._asking.append((traced, asked))
        if asked.arrival // 8 % 2:
            self.do_ask_table()  # others are answered when much may have happened

    def do_ask_table(self) -> None:
        """Whoever reads the table answers what the broker has asked about cancels, as postdate/server/table.py does."""
        broker, asking = self._broker(), self._asking
        self._asking = []
        for traced, asked in asking:
            arrivals = self.table.find(traced.tombstone)
            found = broker.cancels.is_cancelled_by(traced, arrivals)
            self.model.table_answered(asked, Cancelled.CANCELLED if found else Cancelled.UNKNOWN, set(arrivals))

    def do_flush(self) -> None:
        broker = self._broker()
        # One batch at a time, so that each cancel is judged against what was visible at its own place in the order.
        broker.log.flush()
        broker.settle()
        self.look()
        self._answer_cancels()

    # -- time ---------------------------------------------------------------------------------------------------

    def do_pass(self, span_ms: int) -> None:
        """Time passes in normal life: the server comes back whenever it was asked to."""
        until = self.clock.now_ms() + span_ms
        while True:
            self._settle_down()
            wake = self._broker().wake_at_ms
            if wake > until:
                break
            self._move_towards(wake)
        self._move_to(until)
        self._settle_down()
        self._check_complete()

    def _move_towards(self, wake: int) -> None:
        # A failed fire is tried again after its pause; in between the broker has nothing to do.
        self._move_to(max(wake, self.clock.now_ms() + (1_000 if self._broker().fire_error else 1)))

    def _move_to(self, at_ms: int) -> None:
        if at_ms > self.clock.now_ms():
            self.clock.pass_ms(at_ms - self.clock.now_ms())
            self.model.clock_max = max(self.model.clock_max, self.clock.now_ms())

    def _settle_down(self) -> None:
        """Advance and flush until there is nothing to do at this instant."""
        broker, now = self._broker(), self.clock.now_ms()
        for _ in range(100):
            self._advance(broker, now)
            self.do_flush()
            if broker.wake_at_ms > now or broker.fire_error is not None:
                return
        raise Broken(f"after 100 rounds at {now} the broker still wants to be called at {broker.wake_at_ms}")

    def _advance(self, broker: Broker, now: int) -> None:
        try:
            broker.advance(now)
        except DiskFull:
            assert broker.fire_error is not None, "a failed fire can be seen"

    def do_advance(self) -> None:
        """Fires what is due now, without a flush behind it."""
        self._advance(self._broker(), self.clock.now_ms())

    def do_step(self, span_ms: int) -> None:
        """The clock jumps."""
        self.clock.step_ms(span_ms)
        self.model.clock_max = max(self.model.clock_max, self.clock.now_ms())

    def _check_complete(self) -> None:
        broker = self._broker()
        if broker.fire_error is None:
            self.model.complete(min(broker.fold.fired_at_ms, self.clock.now_ms()), self._excused(broker))

    def _excused(self, broker: Broker) -> frozenset[str]:
        """What only the pipeline can bring: it holds it, and the log has it no more, or a job has brought it. While it
        is in time it has staged all that is due; when it is not, the rest is rescued.
        """
        held = [self.model.messages[name] for name in self.table.held_names(broker)]
        theirs = frozenset(m.name for m in held if m.own >= 0 or not broker.log.read(m.arrival, 4))
        return theirs | self.owners.on_way(broker)

    # -- operators ----------------------------------------------------------------------------------------------

    def do_find(self, pick: int, variant: int) -> None:
        """Looks a message up by one of its keys; the variant says by which."""
        self.do_flush()
        if not self.model.messages:
            return
        target = list(self.model.messages.values())[pick % len(self.model.messages)]
        if target.topic in self._broker().fold.topics.by_name:
            self._find(target.topic, target.keys[variant % len(target.keys)])

    def _find(self, topic: str, key: str) -> None:
        broker = self._broker()
        known = broker.fold.topics.get(topic)
        names = []
        for found in broker.find(topic, key):
            if found is not None:
                name = records.decode(found.record).body.decode()
                if name in self.model.messages and self.model.messages[name].own >= 0:
                    continue  # a lookup tells of each place where a job had it
                names.append(name)
                place = (known.numbers[found.queue_id], found.queue_offset)
                if not self._is_forgotten(found, self.model.messages.get(names[-1])):
                    self.model.found(names[-1], found, place, is_deleted=found.arrival < known.born)
        if len(set(names)) < len(names):
            raise Broken(f"a lookup of {key} finds {names}, one of them twice")
        missed = [m for m in self.model.having(topic, key) if m.name not in names and self._must_be_found(m, key)]
        if missed:
            raise Broken(f"a lookup of {key} finds {names}, not {missed[0].name} at {missed[0].arrival}")

    def _must_be_found(self, message: Sent, key: str) -> bool:
        """Whether its record is in the log, and retention has not let go of its key."""
        broker = self._broker()
        waits = message.seen_at is None and not message.maybe_cancelled and key != OTHER_KEY
        if message.own >= 0:
            return False  # it may be in the table alone
        return bool(broker.log.read(message.arrival, 4)) and (message.arrival >= broker.fold.index.begin or waits)

    def _is_forgotten(self, found: Found, message: Sent | None) -> bool:
        """Whether a lookup may say that it does not know: retention has removed its chunk, or its entry."""
        fold = self._broker().fold
        if found.state is not State.UNKNOWN or message is None:
            return False
        number, offset = message.seen_at or (0, NEVER)
        lost_chunk = found.due_at_ms <= fold.far.horizon_at_ms and len(fold.chunks.bases()) < len(self._staged)
        return lost_chunk or offset < fold.queues[number].first or (message.maybe_cancelled and fold.far.taken > 0)

    # -- work in bulk -------------------------------------------------------------------------------------------

    def do_job(self, name: int, where: int, by_ms: int) -> None:
        """Somebody asks to cancel (by 0 ms), or to postpone, what a predicate selects; the id may be known already."""
        predicate = f"topic={TOPICS[where % 2]}" if where < len(TOPICS) else f"key=k{where - len(TOPICS)}"
        with suppress(DiskFull, FlowControl, Refused):
            self.owners.ask(self._broker(), f"job-{name}", predicate, by_ms, self.clock.now_ms())

    def do_import(self, name: int, amount: int, key: int, place: int, count: int) -> None:
        """Somebody begins an import and writes its messages beside the table."""
        broker, now = self._broker(), self.clock.now_ms()
        topic = TOPICS[place % len(TOPICS)]
        number: int | None = None
        self.do_flush()
        with suppress(DiskFull, FlowControl, Refused):
            number = self.owners.begin(broker, f"import-{name}", topic, now)
        if number is not None:
            batch = [self._message(4, amount + index, key, topic, 0, now) for index in range(count)]
            rows = [self._imported(message, own_arrival(number, 0, index)) for index, message in enumerate(batch)]
            self.owners.fill(number, rows)

    def _imported(self, message: Message, own: int) -> TableRow:
        now = self.clock.now_ms()
        sent = replace(self._sent(message, now), arrival=own, own=own, exists=False, is_near=False)
        self.model.sent(sent)
        record = records.encode(message, message.topic.encode(), 0, now, message.born_host)
        row = np.zeros(1, FAR)[0]
        row["unique_hash"], row["key_hash"] = key_hash(sent.unique_key), key_hash(sent.user_key)
        row["due"], row["arrival"], row["size"], row["kind"] = sent.due, own, len(record), MESSAGE
        row["queue"] = self._broker().fold.topics.get(message.topic).numbers[0]
        return TableRow(-1, row, record)

    def do_adopt(self, pick: int) -> None:
        """An import is complete: it is to come into the table."""
        with suppress(DiskFull, Refused):
            self.owners.adopt(self._broker(), pick, self.clock.now_ms())

    def do_fail(self, pick: int) -> None:
        """Somebody withdraws a job."""
        with suppress(DiskFull, Refused):
            self.owners.fail(self._broker(), pick, self.clock.now_ms())

    # -- consumers, topics ----------------------------------------------------------------------------------------

    def do_commit(self, place: int, offset: int) -> None:
        topic = TOPICS[place % len(TOPICS)]
        try:
            self._broker().commit_offsets("group", [(topic, 0, offset)], self.clock.now_ms())
        except DiskFull:
            return

    def do_resize(self, place: int, count: int) -> None:
        topic = TOPICS[place % len(TOPICS)]
        self.do_flush()
        try:
            self._broker().put_topic(topic, self.clock.now_ms(), read_queue_count=count, write_queue_count=count)
        except DiskFull:
            return
        self.do_flush()

    def do_delete(self, place: int) -> None:
        """Deletes a topic and makes it anew: what waited for the old one is cancelled."""
        topic, broker, now = TOPICS[place % len(TOPICS)], self._broker(), self.clock.now_ms()
        self.do_flush()
        try:
            self.model.topic_deleting(topic)
            numbers = list(broker.fold.topics.get(topic).numbers)
            waited = broker.delete_topic(topic, now)
            self.model.topic_deleted(topic)
            self.poppers.forget(numbers)
            broker.put_topic(topic, now, read_queue_count=2, write_queue_count=2)
        except DiskFull:
            return
        if waited < 0:
            raise Broken(f"deleting {topic} says that {waited} messages waited")

    # -- consumers that pop -------------------------------------------------------------------------------------

    def do_pop(self, place: int, count: int, invisible_ms: int) -> None:
        topic = TOPICS[place % len(TOPICS)]
        with suppress(DiskFull, FlowControl):
            self.poppers.pop(self._broker(), topic, count, invisible_ms, self.clock.now_ms())

    def do_ack(self, pick: int, is_wrong: int) -> None:
        place = self.poppers.chosen(pick)
        if place is not None:
            with suppress(DiskFull):
                self.poppers.acknowledge(self._broker(), place, self.clock.now_ms(), is_wrong=bool(is_wrong))

    def do_change(self, pick: int, invisible_ms: int) -> None:
        place = self.poppers.chosen(pick)
        if place is not None:
            with suppress(DiskFull):
                self.poppers.change(self._broker(), place, invisible_ms, self.clock.now_ms())

    def do_bury(self, count: int) -> None:
        """What was given too often becomes a dead letter."""
        with suppress(DiskFull):
            self.poppers.bury(self._broker(), count, self.clock.now_ms())

    # -- Spark --------------------------------------------------------------------------------------------------

    def do_register(self, which: int = 0) -> None:
        """One of the pipelines begins, or begins anew; the other one, if it runs, does not know."""
        self.do_flush()  # an answer is judged by what was true when it was given
        with suppress(DiskFull):
            self._pipeline(which).register(self._broker(), self.clock.now_ms())

    def _pipeline(self, which: int) -> SimulatedPipeline:
        return self.pipelines[which % len(self.pipelines)]

    def do_read(self, count: int, which: int = 0) -> None:
        """First half of a batch: far rows come into the table, and commands among them are carried out."""
        self.do_flush()
        if self._pipeline(which).epoch:
            with suppress(DiskFull, OSError):  # no room for a selection, or for a decision
                self._pipeline(which).read(self._broker(), count, self.clock.now_ms())
        self.look()

    def do_work(self, count: int, which: int = 0) -> None:
        """The first half of a batch by a pipeline that may work: it registers where it must."""
        if self._pipeline(which).epoch != self._broker().fold.far.epoch or not self._pipeline(which).epoch:
            self.do_register(which)
        self.do_read(count, which)

    def do_stage(self, ahead_ms: int, which: int = 0) -> None:
        """Second half of a batch: up to now + ahead everything that the table has is promoted."""
        pipeline = self._pipeline(which)
        if not pipeline.epoch:
            return
        self.do_flush()
        with suppress(DiskFull, OSError):  # no room for the log or for the chunk
            is_newest = pipeline.epoch == self._broker().fold.far.epoch
            is_staged = self._is_staged(pipeline.planned(self._broker(), self.clock.now_ms() + ahead_ms))
            if is_staged != is_newest:
                raise Broken(f"the stage of epoch {pipeline.epoch} was {'accepted' if is_staged else 'refused'}")
            if is_staged:
                pipeline.forget(self._broker())
            else:
                pipeline.die()  # it is told that another one has registered
        self.look()
        self._answer_cancels()

    def _is_staged(self, stage: Stage) -> bool:
        """Calls the broker; says whether it has accepted."""
        self._last_stage = stage
        try:
            self._broker().stage(stage, self.clock.now_ms())
        except Refused:
            return False
        finally:
            self._note_chunks(stage)
        return True

    def _note_chunks(self, stage: Stage) -> None:
        """Also of a stage during which the process dies: it may have been durable by then."""
        self._staged |= set(stage.chunks)

    def do_upload(self, ahead_ms: int, which: int = 0) -> None:
        """A pipeline uploads the chunks of a stage and dies."""
        pipeline = self._pipeline(which)
        if pipeline.epoch:
            with suppress(OSError):
                pipeline.planned(self._broker(), self.clock.now_ms() + ahead_ms)
            pipeline.die()

    def do_begin_stage(self, ahead_ms: int, which: int = 0) -> None:
        """A stage whose chunks are read while everything else goes on, as the server has it."""
        pipeline, staging = self._pipeline(which), self._broker().staging
        if not pipeline.epoch or pipeline.epoch != self._broker().fold.far.epoch:
            return
        with suppress(OSError):
            stage = pipeline.planned(self._broker(), self.clock.now_ms() + ahead_ms)
            staging.check(stage)
            self._begun = stage, staging.verified(stage)

    def do_end_stage(self) -> None:
        """Its record is written, and is compared with where the broker is when it is applied."""
        if self._begun is None:
            return
        (stage, chunks), self._begun = self._begun, None
        if any(self.disk.size(f"chunks/{name}") < 0 for name in stage.chunks):
            return  # another pipeline has registered meanwhile
        self._note_chunks(stage)
        far = self._broker().fold.far
        is_new = (stage.epoch, stage.far[0], stage.horizon[0]) == (far.epoch, far.taken, far.horizon_at_ms)
        try:
            ticket = self._broker().staging.write(stage, chunks, self.clock.now_ms())
        except DiskFull:
            return
        except Refused as error:
            if is_new:
                raise Broken(f"a stage that nobody has overtaken is refused: {error}") from None
            return
        self.do_flush()
        if not is_new and ticket.answer.accepted:
            raise Broken(f"{stage} was accepted though the broker had moved on")

    def do_stage_again(self) -> None:
        """A stage is repeated by a pipeline that did not hear the answer."""
        last, far = self._last_stage, self._broker().fold.far
        if last is None:
            return
        self.do_flush()
        moved = (last.far[0], last.horizon[0]) != (far.taken, far.horizon_at_ms) or last.epoch != far.epoch
        if not moved or any(self.disk.size(f"chunks/{name}") < 0 for name in last.chunks):
            return
        try:
            self._broker().stage(last, self.clock.now_ms())
        except (Refused, DiskFull):
            return
        raise Broken(
            f"the stage {last} was accepted though the broker is at far {far.taken}, horizon {far.horizon_at_ms}"
        )

    def do_die(self, which: int) -> None:
        """A pipeline dies. Nobody is told: it just promotes nothing more."""
        self._pipeline(which).die()

    def do_serve(self, minutes: int, which: int = 0) -> None:
        """A pipeline in normal life: whenever a minute turns (here the lead), it takes all that came and promotes up to
        the end of the next. From its first batch on, nothing may have to be rescued.
        """
        pipeline, minute_ms = self._pipeline(which), self.settings.lead_ms
        rescued: int | None = None
        for _ in range(minutes):
            self.do_pass(minute_ms - self.clock.now_ms() % minute_ms)
            if rescued is not None and self._broker().rescues.count > rescued:
                raise Broken(f"{self._broker().rescues.count - rescued} messages were rescued from a pipeline in time")
            if pipeline.epoch != self._broker().fold.far.epoch or not pipeline.epoch:
                self.do_register(which)
            self.do_read(1_000_000, which)
            self.do_stage(2 * minute_ms, which)
            rescued = self._broker().rescues.count if self._is_in_time() else None

    def _is_in_time(self) -> bool:
        """Whether the pipeline has done its work of this minute, and nothing is in the way, such as a full disk."""
        broker, far = self._broker(), self._broker().fold.far
        ahead_ms = far.horizon_at_ms - self.clock.now_ms()
        return far.taken == far.length and ahead_ms >= 2 * self.settings.lead_ms and broker.fire_error is None

    # -- snapshots, retention, faults -------------------------------------------------------------------------------

    def do_snapshot(self, other: int) -> None:
        """Takes a snapshot; after every step the broker does something else, chosen by `other`."""
        dice = random.Random(other)
        try:
            for step in self._broker().snapshot():
                if step is not None:
                    step()
                if dice.random() < 0.3:
                    self._meanwhile(dice)
        except OSError:
            return

    def _meanwhile(self, dice: random.Random) -> None:
        choice = dice.randrange(4)
        if choice == 0:
            self.do_send(
                dice.randrange(1, 5), dice.randrange(12_000), dice.randrange(4), dice.randrange(4), dice.choice((1, 8))
            )
        elif choice == 1:
            self.do_cancel(dice.randrange(100), dice.randrange(2))
        elif choice == 2:
            self._move_to(self.clock.now_ms() + dice.randrange(3_000))
            self.do_advance()
        self.do_flush()

    def do_retain(self) -> None:
        self._broker().retain(self.clock.now_ms())
        self.poppers.note_gone(self._broker())

    def do_close(self) -> None:
        """A clean stop and start."""
        broker = self._broker()
        self.do_flush()
        with suppress(OSError):  # no room for the last snapshot: the next start replays more
            broker.close()
        self._reopen()

    def _reopen(self) -> None:
        self.broker = None
        self._start()
        self.look(everything=True)

    def do_kill(self) -> None:
        self._crash(power_seed=None)

    def do_power(self, seed: int) -> None:
        """Power is lost. An async broker promises nothing then, so it is only killed."""
        self._crash(power_seed=None if self.settings.flush == "async" else seed)

    def do_spoil(self, bit: int) -> None:
        """The process dies and the newest snapshot goes bad: the start falls back to the older one, or to the whole
        log.
        """
        paths = [path for path in self.disk.paths() if path.startswith("snapshots/") and path[-1].isdecimal()]
        # With the last snapshot gone too, a start needs the whole log and every chunk.
        is_whole = self._broker().log.is_whole and self._staged <= set(self.disk.list("chunks"))
        spoilt = paths[-1] if len(paths) > 1 or (paths and is_whole) else None
        if spoilt is None:
            self._crash(power_seed=None)
        else:
            self._spoilt.add(spoilt)
            place = bit % (8 * self.disk.size(spoilt))
            self._crash(power_seed=None, then=lambda: self.disk.flip(spoilt, place))

    def do_kill_soon(self, points: int) -> None:
        """Somewhere in what follows, at the n-th fault point from here, the process dies."""
        self.disk.kill_after = points

    def do_fail_sync(self) -> None:
        self.disk.failing_syncs = 1

    def do_full(self, room_bytes: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + room_bytes

    def do_room(self) -> None:
        self.disk.capacity_bytes = 1 << 40

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Lets everything come due and looks once more; then the folder is checked."""
        self.disk.kill_after = None
        self.disk.failing_syncs = 0
        self.do_room()
        self._end_pipeline()
        for _ in range(10_000):
            self._settle_down()
            wake = self._broker().wake_at_ms
            if wake == NEVER:
                break
            self._move_towards(wake)
        self._move_to(max([self.clock.now_ms(), *(m.due for m in self.model.messages.values())]))
        self._settle_down()
        self._check_complete()
        self.look(everything=True)
        self._find_all()
        self._pop_the_rest()
        self._broker().close()
        self.broker = None
        self._check_folder()

    def _find_all(self) -> None:
        for topic, key in {(m.topic, key) for m in self.model.messages.values() for key in m.keys}:
            if topic in self._broker().fold.topics.by_name:
                self._find(topic, key)

    def _pop_the_rest(self) -> None:
        """Every lease ends, and whoever pops is given all that is left."""
        broker, now = self._broker(), self.clock.now_ms()
        while broker.leases.spent(1):
            self.poppers.bury(broker, 50, now)
            self.do_flush()
        # One topic may give nothing while the group has too much of the other.
        while any(self._pop_some(topic, now) for topic in TOPICS):
            self.do_flush()
            self.poppers.acknowledge_all(broker, now)
            self.do_flush()
        self.poppers.check_none_lost(broker, TOPICS)

    def _pop_some(self, topic: str, now: int) -> bool:
        try:
            return self.poppers.pop(self._broker(), topic, 50, 3_600_000, now)
        except FlowControl:
            return False

    def _end_pipeline(self) -> None:
        """The pipeline hands over all that it can take and hold."""
        self.do_ask_table()
        if self._broker().fold.far.epoch or self._broker().fold.jobs.open():
            self.do_register()
            self.do_read(1_000_000)
            self.do_stage(100 * 365 * 86_400_000)
        if self._broker().fold.jobs.open():
            raise Broken(f"a job is {self._broker().fold.jobs.open()[0]}, and a pipeline has taken everything")

    def _check_folder(self) -> None:
        """What lies on the disk, after a crash or a clean end, is whole."""
        findings = [f for f in check_folder(self.disk.copy()).findings if not f.startswith(tuple(self._spoilt))]
        if findings:
            raise Broken("check: " + "; ".join(findings[:3]))


def _delay(form: int, amount: int, now: int) -> dict[str, str]:
    """Properties that ask for a delay of `amount` ms, or near it."""
    if form == 1:
        return {"DELAY": str(1 + amount % 5)}
    if form == 2:
        return {"TIMER_DELAY_SEC": str(amount // 1_000)}
    if form == 3:
        return {"TIMER_DELAY_MS": str(amount)}
    if form == 4:
        return {"TIMER_DELIVER_MS": str(now + amount)}
    if form == 5:
        return {"TIMER_DELIVER_MS": str(now - amount)}
    if form == 6:  # many at the same instant
        return {"TIMER_DELIVER_MS": str((now + amount) // 5_000 * 5_000 + 5_000)}
    return {}


def with_settings(**changes: int | str) -> Settings:
    """The simulation's settings with some of them changed."""
    return replace(SETTINGS, **changes)  # type: ignore[arg-type]
