"""Consumer groups and their offsets: small tables of the fold.

An offset belongs to (group, topic, queue id) and says which entry the group wants next. Deleting a topic or a group
forgets its offsets. Who is connected, and which member reads what, only the server knows.
"""

from typing import Any

Offsets = dict[tuple[str, int], int]  # (topic, queue id) -> offset


class Groups:
    """Settings of the groups that were created, and offsets of every group that committed one."""

    def __init__(self) -> None:
        self.settings: dict[str, dict[str, Any]] = {}
        self._offsets: dict[str, Offsets] = {}
        self.offset_count = 0  # of all groups

    def __contains__(self, name: str) -> bool:
        return name in self.settings or name in self._offsets

    def __len__(self) -> int:
        return len(self.settings.keys() | self._offsets.keys())

    def all_settings(self) -> dict[str, dict[str, Any]]:
        """Every group by name, with its settings; empty where it was never created."""
        return {name: self.settings.get(name, {}) for name in sorted(self.settings.keys() | self._offsets.keys())}

    def put(self, name: str, settings: dict[str, Any]) -> None:
        self.settings[name] = settings

    def delete(self, name: str) -> None:
        self.settings.pop(name, None)
        self.offset_count -= len(self._offsets.pop(name, ()))

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        offsets = self._offsets.setdefault(group, {})
        self.offset_count += (topic, queue_id) not in offsets
        offsets[topic, queue_id] = offset

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset; None where the group never committed one."""
        return self._offsets.get(group, {}).get((topic, queue_id))

    def offsets(self, group: str) -> Offsets:
        return dict(self._offsets.get(group, {}))

    def forget_topic(self, topic: str) -> None:
        for offsets in self._offsets.values():
            for place in [place for place in offsets if place[0] == topic]:
                del offsets[place]
                self.offset_count -= 1

    def state(self) -> dict[str, Any]:
        rows = [
            [group, topic, queue_id, offset]
            for group, offsets in self._offsets.items()
            for (topic, queue_id), offset in offsets.items()
        ]
        return {"groups": dict(self.settings), "offsets": rows}

    def load(self, state: dict[str, Any]) -> None:
        self.settings = dict(state["groups"])
        self._offsets, self.offset_count = {}, 0
        for group, topic, queue_id, offset in state["offsets"]:
            self.commit(group, topic, queue_id, offset)
