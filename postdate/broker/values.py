"""Key-value settings, as calls. The table is in state/values.py.

All of them are in RAM and in every snapshot, so their number and the size of each have a limit.
"""

from postdate.broker.settings import CurrentSettings
from postdate.broker.topics import TopicCalls
from postdate.broker.writing import Writer
from postdate.errors import FlowControl
from postdate.state.fold import Fold
from postdate.storage.batch import VALUE


class ValueCalls:
    """Stores and deletes values; each call is durable on return, and one that changes nothing writes nothing."""

    def __init__(self, fold: Fold, writer: Writer, topics: TopicCalls, settings: CurrentSettings) -> None:
        self._fold, self._writer, self._topics, self._settings = fold, writer, topics, settings

    def put(self, namespace: str, key: str, value: str, at_ms: int) -> None:
        """Raises UsageError for a value that is too long, FlowControl where there are too many."""
        known, count, limit = self._fold.values.find(namespace, key), len(self._fold.values), self._settings.limits
        if known == value:
            return
        if known is None and count >= limit.values_max:
            raise FlowControl(f"values_max: there are {limit.values_max} values, the limit; delete some first")
        body = {"op": "put", "namespace": namespace, "key": key, "value": value}
        self._topics.check_size(f"namespace, key and value of {key[:64]!r}", body)
        self._writer.write_system(VALUE, body, at_ms)
        self._writer.flush()

    def delete(self, namespace: str, key: str, at_ms: int) -> None:
        if self._fold.values.find(namespace, key) is None:
            return
        self._writer.write_system(VALUE, {"op": "delete", "namespace": namespace, "key": key}, at_ms)
        self._writer.flush()
