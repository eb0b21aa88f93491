"""Topics and the numbers of their queues: a small table of the fold.

Every queue that ever existed has a number, given when its topic is created or grows, and never given again. Rows, wheel
entries and staged rows carry that number: an entry of a deleted topic cannot come up in a topic that has the same name
later. `target` says where an entry for a number goes now: to itself, to (id mod count) where the topic has shrunk, or
nowhere (GONE) where the topic is deleted.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from postdate.errors import TopicNotFound

GONE = -1
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# RocketMQ's own topics: no producer may send to them, there or here.
RESERVED_TOPICS = frozenset(
    {SCHEDULE_TOPIC, "TBW102", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC",
     "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"}
)  # fmt: skip
PERM_READ, PERM_WRITE, PERM_INHERIT = 4, 2, 1


@dataclass
class Topic:
    """A topic. `numbers[i]` is the number of its queue i; the list never gets shorter."""

    name: str
    read_queue_count: int = 8
    write_queue_count: int = 8
    perm: int = PERM_READ | PERM_WRITE
    attributes: dict[str, str] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    born: int = 0  # where in the log it was created: messages before it were sent to an earlier topic of that name


class Topics:
    """All topics by name, all queue numbers."""

    def __init__(self) -> None:
        self.by_name: dict[str, Topic] = {}
        self.places: list[tuple[str, int]] = []  # number -> (topic, queue id), of deleted topics too
        self.target: list[int] = []  # number -> number or GONE
        self.target_array = np.empty(0, np.int32)

    def get(self, name: str) -> Topic:
        topic = self.by_name.get(name)
        if topic is None:
            raise TopicNotFound(f"topic {name!r} does not exist")
        return topic

    def put(
        self, name: str, read_queue_count: int, write_queue_count: int, perm: int, attributes: dict[str, str],
        at_offset: int = 0,
    ) -> None:  # fmt: skip
        """Creates a topic or changes it; `at_offset` is where in the log its record stands."""
        topic = self.by_name.setdefault(name, Topic(name, born=at_offset))
        topic.read_queue_count, topic.write_queue_count = read_queue_count, write_queue_count
        topic.perm, topic.attributes = perm, dict(attributes)
        count = max(read_queue_count, write_queue_count)
        self.grow(topic, count)
        for queue_id, number in enumerate(topic.numbers):
            self.target[number] = number if queue_id < count else topic.numbers[queue_id % read_queue_count]
        self.target_array = np.array(self.target, np.int32)

    def grow(self, topic: Topic, queue_count: int) -> None:
        """Gives numbers to queues up to this count."""
        for queue_id in range(len(topic.numbers), queue_count):
            number = len(self.places)
            topic.numbers.append(number)
            self.places.append((topic.name, queue_id))
            self.target.append(number)
        self.target_array = np.array(self.target, np.int32)

    def delete(self, name: str) -> Topic | None:
        """Forgets a topic; entries for its queues go nowhere from now on."""
        topic = self.by_name.pop(name, None)
        if topic is not None:
            for number in topic.numbers:
                self.target[number] = GONE
            self.target_array = np.array(self.target, np.int32)
        return topic

    def state(self) -> dict[str, Any]:
        return {
            "topics": [asdict(topic) for topic in self.by_name.values()],
            "places": list(self.places),
            "target": list(self.target),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.by_name = {entry["name"]: Topic(**entry) for entry in state["topics"]}
        self.places = [(name, queue_id) for name, queue_id in state["places"]]
        self.target = list(state["target"])
        self.target_array = np.array(self.target, np.int32)
