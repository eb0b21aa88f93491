"""Topics and groups on first use, as RocketMQ makes them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from postdate.broker.broker import Broker
from postdate.broker.sending import refuse_system_topic
from postdate.broker.view import PERM_INHERIT, PERM_READ, PERM_WRITE, TopicInfo
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import GroupNotFound, IllegalMessage, NoPermission, TopicNotFound
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, TOPIC_CHARACTERS_MAX, check_group, check_topic

DEFAULT_TOPIC = "TBW102"  # clients ask for its route to learn how a new topic would look
_GROUP_TOPIC_QUEUES = 1
_NEW_TOPIC_QUEUES = 4  # RocketMQ's clients ask for so many


class PromisedTopic(NamedTuple):
    """A topic that does not exist yet, as it will be when it is first used."""

    name: str
    read_queue_count: int
    write_queue_count: int
    perm: int = PERM_READ | PERM_WRITE
    attributes: Mapping[str, str] = MappingProxyType({})
    numbers: Sequence[int] = ()


class Birth:
    """Makes what is asked for and may be made. Every call that makes something waits for the disk."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock

    @property
    def _settings(self) -> Settings:
        return self._broker.settings

    @property
    def new_queue_count(self) -> int:
        """How many queues a topic gets that nobody has asked for more or fewer of."""
        return min(_NEW_TOPIC_QUEUES, self._settings.default_queue_count)

    def topic(self, name: str, queue_count: int = _NEW_TOPIC_QUEUES) -> TopicInfo:
        """A topic that somebody uses. Raises TopicNotFound where it may not be made."""
        known = self._broker.view.find_topic(name)
        if known is not None:
            return known
        check_topic(name)
        if name.startswith(RETRY_TOPIC_PREFIX):
            return self.retry_topic(name.removeprefix(RETRY_TOPIC_PREFIX))
        if not self._settings.auto_create_topics:
            raise TopicNotFound(f"topic {name!r} does not exist, and auto_create_topics is off: create it first")
        return self._put(name, max(1, min(queue_count, self._settings.default_queue_count)))

    def promised(self, name: str) -> TopicInfo:
        """A topic, or what it will look like when it is first used. Makes nothing. Raises TopicNotFound.

        A client that is told "unknown" asks again half a minute later. A consumer that is started before anybody has
        sent to its topic would be late by that, and so would the first retry of a new group.
        """
        known = self._broker.view.find_topic(name)
        if known is not None:
            return known
        if name == DEFAULT_TOPIC and self._settings.auto_create_topics:
            count = self._settings.default_queue_count
            return PromisedTopic(name, count, count, PERM_READ | PERM_WRITE | PERM_INHERIT)
        if name.startswith(RETRY_TOPIC_PREFIX):
            if self._may_have_group(name.removeprefix(RETRY_TOPIC_PREFIX)):
                return PromisedTopic(name, _GROUP_TOPIC_QUEUES, _GROUP_TOPIC_QUEUES)
        elif self._settings.auto_create_topics and _is_anybodys(name):
            return PromisedTopic(name, self.new_queue_count, self.new_queue_count)
        raise TopicNotFound(f"there is no route for topic {name[:TOPIC_CHARACTERS_MAX]!r}: it does not exist")

    def subscribed(self, name: str) -> None:
        """A topic that a consumer subscribes to is made as its route has promised; one that may not be made is left to
        whoever uses it.
        """
        if self._settings.auto_create_topics and _is_anybodys(name):
            self.topic(name)

    def _may_have_group(self, name: str) -> bool:
        return _is_group(name) and (self._settings.auto_create_groups or self._broker.view.has_group(name))

    def retry_topic(self, group: str) -> TopicInfo:
        """Where messages that a group sends back wait. Raises GroupNotFound where the group may not be made."""
        self.group(group)
        return self._group_topic(RETRY_TOPIC_PREFIX + group)

    def dead_letter_topic(self, group: str) -> TopicInfo:
        self.group(group)
        return self._group_topic(DLQ_TOPIC_PREFIX + group)

    def _group_topic(self, name: str) -> TopicInfo:
        known = self._broker.view.find_topic(name)
        return known if known is not None else self._put(name, _GROUP_TOPIC_QUEUES)

    def _put(self, name: str, queue_count: int) -> TopicInfo:
        self._broker.put_topic(name, self._clock.now_ms(), read_queue_count=queue_count, write_queue_count=queue_count)
        return self._broker.view.topic(name)

    def group(self, name: str) -> None:
        """A consumer group that somebody uses. Raises GroupNotFound where it may not be made."""
        if self._broker.view.has_group(name):
            return
        check_group(name)
        if not self._settings.auto_create_groups:
            raise GroupNotFound(f"group {name!r} does not exist, and auto_create_groups is off: create it first")
        self._broker.put_group(name, {}, self._clock.now_ms())


def _is_anybodys(name: str) -> bool:
    """Whether a topic of that name may be made by using it."""
    try:
        check_topic(name)
        refuse_system_topic(name)
    except (IllegalMessage, NoPermission):
        return False
    return not name.startswith(DLQ_TOPIC_PREFIX)


def _is_group(name: str) -> bool:
    try:
        check_group(name)
    except IllegalMessage:
        return False
    return True
