"""Operators: they look messages up by key, change and delete topics, and commit the offset of a group.

- A lookup finds each message of its key once, and where it is, unless retention has removed it.
- Deleting a topic cancels the messages that wait for it.
"""

from postdate.arrival import NEVER
from postdate.broker.lookup import Found, State
from postdate.errors import DiskFull
from postdate.storage import record as records
from verify.simulation.model import Broken, Sent
from verify.simulation.poppers import Poppers
from verify.simulation.producers import OTHER_KEY
from verify.simulation.site import Site, Watch, topic_at


class Operators:
    def __init__(self, site: Site, watch: Watch, poppers: Poppers) -> None:
        self._site = site
        self._watch = watch
        self._poppers = poppers  # forget the leases of deleted topics

    # -- lookups ------------------------------------------------------------------------------------------------

    def find(self, pick: int, variant: int) -> None:
        """Looks a message up by one of its keys; the variant says by which."""
        self._watch.flush()
        target = self._site.pick_message(pick)
        if target is not None and self._site.has_topic(target.topic):
            self._find(target.topic, target.keys[variant % len(target.keys)])

    def find_all(self) -> None:
        for topic, key in sorted({(m.topic, key) for m in self._site.model.messages.values() for key in m.keys}):
            if self._site.has_topic(topic):
                self._find(topic, key)

    def _find(self, topic: str, key: str) -> None:
        names = []
        for found in self._site.broker.find(topic, key):
            if found is not None:
                self._site.digest.note("find", found)
                name = records.decode(found.record).body.decode()
                if found.state is State.HALF:
                    if name not in self._site.model.open_halves:
                        raise Broken(f"a lookup of {key} finds the half {name}, which is not open")
                    continue
                message = self._site.model.messages.get(name)
                if message is None or not message.is_of_job:  # a lookup finds each place where a job has put it
                    names.append(name)
                    self._judge(topic, name, found, message)
        if len(set(names)) < len(names):
            raise Broken(f"a lookup of {key} finds {names}, one of them twice")
        having = self._site.model.messages_with_key(topic, key)
        missed = [m for m in having if m.name not in names and self._must_be_found(m, key)]
        if missed:
            raise Broken(f"a lookup of {key} finds {names}, not {missed[0].name} at {missed[0].arrival}")

    def _judge(self, topic: str, name: str, found: Found, message: Sent | None) -> None:
        known = self._site.broker.fold.topics.get(topic)
        place = (known.numbers[found.queue_id], found.queue_offset)
        if not self._is_forgotten(found, message):
            self._site.model.check_found(name, found, place, is_deleted=found.arrival < known.born)

    def _must_be_found(self, message: Sent, key: str) -> bool:
        """Whether its record is in the log, and retention has not removed its key."""
        broker = self._site.broker
        waits = message.seen_at is None and not message.maybe_cancelled and key != OTHER_KEY
        if message.is_of_job:
            return False  # it may be in the table alone
        return bool(broker.log.read(message.arrival, 4)) and (message.arrival >= broker.fold.index.begin or waits)

    def _is_forgotten(self, found: Found, message: Sent | None) -> bool:
        """Whether a lookup may answer "unknown": retention has removed the chunk or the entry."""
        fold = self._site.broker.fold
        if found.state is not State.UNKNOWN or message is None:
            return False
        has_moves = fold.moves.count > 0 and found.due_at_ms <= fold.fired_at_ms
        if has_moves and (message.cancelled or not self._site.broker.log.read(message.arrival, 4)):
            return True  # a record that is gone may have moved it
        number, offset = message.seen_at or (0, NEVER)
        lost_count = len(self._site.staged_chunks) - len(fold.chunks.bases())
        is_chunk_lost = found.due_at_ms <= fold.far.horizon_at_ms and lost_count > 0
        return is_chunk_lost or offset < fold.queues[number].first or (message.maybe_cancelled and fold.far.taken > 0)

    # -- topics and groups --------------------------------------------------------------------------------------

    def commit(self, place: int, offset: int) -> None:
        with self._site.digest.suppress(DiskFull):
            ticket = self._site.broker.commit_offsets("group", [(topic_at(place), 0, offset)], self._site.now_ms())
            self._site.digest.note("commit", ticket.offsets)

    def resize(self, place: int, count: int) -> None:
        self._watch.flush()
        try:
            self._put_topic(topic_at(place), count)
        except DiskFull as error:
            self._site.digest.note_error(error)
            return
        self._watch.flush()

    def _put_topic(self, topic: str, count: int) -> None:
        self._site.broker.put_topic(topic, self._site.now_ms(), read_queue_count=count, write_queue_count=count)

    def delete(self, place: int) -> None:
        """Deletes a topic and creates it again: the messages of the old one are cancelled."""
        self._watch.flush()
        with self._site.digest.suppress(DiskFull):
            waited = self._delete(topic_at(place))
            self._put_topic(topic_at(place), 2)
            if waited < 0:
                raise Broken(f"deleting {topic_at(place)} says that {waited} messages waited")

    def _delete(self, topic: str) -> int:
        """Returns how many messages waited for it, as the broker says."""
        broker, model = self._site.broker, self._site.model
        model.note_topic_deleting(topic)
        numbers = list(broker.fold.topics.get(topic).numbers)
        waited = broker.delete_topic(topic, self._site.now_ms())
        self._site.digest.note("delete", waited)
        model.note_topic_deleted(topic)
        self._poppers.forget(numbers)
        return waited
