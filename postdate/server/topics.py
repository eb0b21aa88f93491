"""Topics and groups on first use, as RocketMQ makes them."""

from postdate.broker import Broker
from postdate.clock import Clock
from postdate.errors import GroupNotFound, TopicNotFound
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, check_group, check_topic
from postdate.topics import Topic

DEFAULT_TOPIC = "TBW102"  # clients ask for its route to learn how a new topic would look
_GROUP_TOPIC_QUEUES = 1


class Birth:
    """Makes what is asked for and may be made. Every call that makes something waits for the disk."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._settings = broker.settings

    def topic(self, name: str, queue_count: int) -> None:
        """A topic that somebody sends to. Raises TopicNotFound where it may not be made."""
        if name in self._broker.fold.topics.by_name:
            return
        check_topic(name)
        if name.startswith(RETRY_TOPIC_PREFIX):
            self.retry_topic(name.removeprefix(RETRY_TOPIC_PREFIX))
            return
        if not self._settings.auto_create_topics:
            raise TopicNotFound(f"topic {name!r} does not exist, and auto_create_topics is off: create it first")
        self._put(name, max(1, min(queue_count, self._settings.default_queue_count)))

    def retry_topic(self, group: str) -> Topic:
        """Where messages that a group sends back wait. Raises GroupNotFound where the group may not be made."""
        self.group(group)
        return self._group_topic(RETRY_TOPIC_PREFIX + group)

    def dead_letter_topic(self, group: str) -> Topic:
        self.group(group)
        return self._group_topic(DLQ_TOPIC_PREFIX + group)

    def _group_topic(self, name: str) -> Topic:
        if name not in self._broker.fold.topics.by_name:
            self._put(name, _GROUP_TOPIC_QUEUES)
        return self._broker.fold.topics.get(name)

    def _put(self, name: str, queue_count: int) -> None:
        self._broker.put_topic(name, self._clock.now_ms(), read_queue_count=queue_count, write_queue_count=queue_count)

    def group(self, name: str) -> None:
        """A consumer group that somebody uses. Raises GroupNotFound where it may not be made."""
        if name in self._broker.fold.groups:
            return
        check_group(name)
        if not self._settings.auto_create_groups:
            raise GroupNotFound(f"group {name!r} does not exist, and auto_create_groups is off: create it first")
        self._broker.put_group(name, {}, self._clock.now_ms())
