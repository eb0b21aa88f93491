"""Topics and groups, as calls: made, changed and deleted; and the offsets that groups commit.

Each is kept in RAM and in every snapshot, so each has a limit, and a call beyond it is refused before anything is
written. The tables are in state/topics.py and state/groups.py. The server decides who may make what on first use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from postdate.broker.cancelling import CancelCalls
from postdate.broker.sending import SendCalls, refuse_system_topic
from postdate.broker.settings import CurrentSettings
from postdate.broker.view import View
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl, UsageError
from postdate.message import check_group, check_topic
from postdate.state.fold import Fold
from postdate.storage.batch import GROUP, OFFSETS, TOPIC, system_body

# RocketMQ's own settings have three levels. A record must stay readable, and a reader of JSON has a stack.
_GROUP_SETTINGS_LEVELS_MAX = 32


class TopicCalls:
    """Makes, changes and deletes topics and groups, and commits offsets."""

    def __init__(
        self, fold: Fold, writer: Writer, sending: SendCalls, view: View, cancels: CancelCalls,
        settings: CurrentSettings,
    ) -> None:  # fmt: skip
        self._fold, self._writer, self._sending, self._view = fold, writer, sending, view
        self._cancels, self._settings = cancels, settings

    # -- topics -------------------------------------------------------------------------------------------------

    def put_topic(
        self, name: str, at_ms: int, *, read_queue_count: int = 8, write_queue_count: int = 8, perm: int = 6,
        attributes: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Creates a topic or changes it; durable on return."""
        check_topic(name)
        refuse_system_topic(name)
        limit = self._settings.limits.topic_queues_max
        for label, count in (("read_queue_count", read_queue_count), ("write_queue_count", write_queue_count)):
            if not 1 <= count <= limit:
                raise UsageError(f"{label} of topic {name!r} is {count}, expected 1 to {limit}")
        if not 0 <= perm <= 7:
            raise UsageError(f"perm of topic {name!r} is {perm}, expected 0 to 7")
        topics, limit = self._fold.topics.by_name, self._settings.now.topics_max
        if name not in topics and len(topics) > limit:  # one of them is SCHEDULE_TOPIC_XXXX, which is nobody's
            raise FlowControl(f"topics_max: there are {limit} topics, the limit; delete some first")
        # A queue's number is never given again, so the queues of deleted topics count, too.
        known, count, limit = topics.get(name), len(self._fold.topics.places), self._settings.limits.queues_max
        fresh_count = max(read_queue_count, write_queue_count) - (len(known.numbers) if known else 0)
        if fresh_count > 0 and count + fresh_count > limit:
            raise FlowControl(
                f"queues_max: {count} queues were made, {fresh_count} more would exceed the limit of {limit}"
            )
        self.check_size(f"the attributes of topic {name!r}", attributes or {})
        body = {"op": "put", "name": name, "read": read_queue_count, "write": write_queue_count, "perm": perm}
        self._writer.write_system(TOPIC, {**body, "attributes": dict(attributes or {})}, at_ms)
        self._writer.flush()
        self._sending.forget_topics()

    def delete_topic(self, name: str, at_ms: int) -> int:
        """Deletes a topic and cancels what waits for it; durable on return. Returns how many messages waited in the
        wheel and the far queue.
        """
        self._fold.topics.get(name)
        refuse_system_topic(name)
        self._writer.flush()
        already_cancelled = self._cancels.count_cancelled_far(name)
        ticket = self._writer.write_system(TOPIC, {"op": "delete", "name": name}, at_ms)
        self._writer.flush()
        self._sending.forget_topics()
        return int(ticket.answer) - already_cancelled

    # -- groups -------------------------------------------------------------------------------------------------

    def put_group(self, name: str, settings: Mapping[str, Any], at_ms: int) -> None:
        """Creates a group or changes its settings, which are plain JSON; durable on return."""
        check_group(name)
        self._admit_group(name)
        if not _is_nested_within(settings, _GROUP_SETTINGS_LEVELS_MAX):
            raise UsageError(
                f"the settings of group {name!r} are nested deeper than {_GROUP_SETTINGS_LEVELS_MAX} levels"
            )
        self.check_size(f"the settings of group {name!r}", settings)
        self._writer.write_system(GROUP, {"op": "put", "name": name, "settings": dict(settings)}, at_ms)
        self._writer.flush()

    def delete_group(self, name: str, at_ms: int) -> None:
        """Forgets a group with its offsets; durable on return."""
        check_group(name)
        self._writer.write_system(GROUP, {"op": "delete", "name": name}, at_ms)
        self._writer.flush()

    def _admit_group(self, name: str) -> None:
        groups, limit = self._fold.groups, self._settings.now.groups_max
        if name not in groups and len(groups) >= limit:
            raise FlowControl(f"groups_max: there are {limit} groups, the limit; delete some first")

    def check_size(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises UsageError for values that are too long to be kept in RAM and in every snapshot."""
        size, limit = len(system_body(values)), self._settings.limits.definition_bytes_max
        if size > limit:
            raise UsageError(f"definition_bytes_max: {what} take {size} bytes, the limit is {limit}")

    # -- offsets ------------------------------------------------------------------------------------------------

    def commit_offsets(self, group: str, offsets: Sequence[tuple[str, int, int]], at_ms: int) -> Ticket:
        """Commits (topic, queue id, offset) for a group."""
        check_group(group)
        self._admit_group(group)
        for topic, queue_id, offset in offsets:
            self._view.queue(topic, queue_id)  # raises where it does not exist
            if offset < 0:
                raise UsageError(f"offset {offset} of group {group!r} for queue {queue_id} of {topic!r} is negative")
        return self._writer.write_system(
            OFFSETS, {"group": group, "offsets": [list(entry) for entry in offsets]}, at_ms
        )

    def admit_offsets(self, fresh_count: int) -> None:
        """Raises FlowControl where groups would have too many offsets with `fresh_count` more."""
        count, limit = self._fold.groups.offset_count, self._settings.limits.offsets_max
        if count + fresh_count > limit:
            raise FlowControl(f"offsets_max: groups have {count} offsets, the limit is {limit}; delete some groups")

    def admit_popper(self, group: str, fresh_count: int) -> None:
        """Lets a group that pops commit `fresh_count` offsets that it did not have. Raises FlowControl."""
        self._admit_group(group)
        self.admit_offsets(fresh_count)


def _is_nested_within(value: Any, levels: int) -> bool:
    if not isinstance(value, (Mapping, list, tuple)):
        return True
    inner = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_nested_within(each, levels - 1) for each in inner)
