"""The sink of format("postdate"): a frame's rows, scheduled. All of them, or none.

Spark makes the writer in the driver, runs `write` once for each partition, again where a task has failed, and then
calls `commit`, or `abort`, also after a commit that has raised. Each runs in a process of its own, so that nothing but
the pickled writer and the messages of its tasks goes from one to the next.
"""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from postdate.errors import UsageError
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.imports import imports
from postdate.spark.imports.loading import Loaded, load
from postdate.spark.imports.options import checked_topic, fitted, named_columns, wanted_of

# Options by their names for Spark, which has them in small letters; those of a column have the name of `Wanted`.
_COLUMNS = {
    "due": "due", "due_unit": "unit", "zone": "zone", "body": "body", "key": "key", "tag": "tag",
    "properties": "properties", "queue": "queue",
}  # fmt: skip
OPTIONS = ("addr", "bulk", "topic", *_COLUMNS, "property", "id", "skip_bad", "wait")


def writer(options: Mapping[str, str], schema: Any, *, overwrite: bool = False) -> "Writer":
    """Begins the import. Raises UsageError, Refused, TopicNotFound, and Unreachable where no broker answers."""
    if overwrite:
        raise UsageError('messages can only be added: write with mode("append")')
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(f"option {unknown[0]} is not known, expected one of {', '.join(OPTIONS)}")
    wishes: dict[str, Any] = {name: options[option] for option, name in _COLUMNS.items() if option in options}
    wishes["named"] = named_columns(options.get("property", ""))
    wishes.setdefault("due", "")
    wanted = fitted(wanted_of(wishes), {field.name: field.dataType.simpleString() for field in schema.fields})
    topic = checked_topic(options.get("topic", ""))
    wait = options.get("wait", "true").lower()
    if wait not in ("true", "false"):
        raise UsageError(f"option wait is {wait!r}, expected true or false")
    broker = BrokerClient(options.get("addr"), options.get("bulk", ""))
    import_ = imports.begin(broker, options.get("id") or uuid.uuid4().hex, topic, wanted)
    return Writer(broker, import_, options.get("skip_bad", ""), is_waiting=wait == "true")


@dataclass
class Message(WriterCommitMessage):
    loaded: Loaded | None


class Writer(DataSourceArrowWriter):
    """Writes one import. One without a plan was adopted before: the writer writes nothing, and waits for its end."""

    def __init__(self, broker: BrokerClient, import_: imports.Import, skip_bad: str, *, is_waiting: bool) -> None:
        self._broker = broker
        self._id, self._plan = import_.job.id, import_.plan
        self._skip_bad = skip_bad  # a file for bad rows
        self._is_waiting = is_waiting

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        if self._plan is None:
            return Message(None)
        context = TaskContext.get()
        assert context is not None, "Spark runs tasks in a context"
        return Message(load(self._plan, context.partitionId(), iterator))

    def commit(self, messages: list[Any]) -> None:
        """Hands the files to the pipeline. Raises BadRows; then nothing is scheduled."""
        if self._plan is not None:
            loaded = [message.loaded for message in messages if message is not None]
            bad_count = sum(part.bad_count for part in loaded)
            if bad_count:
                bad = imports.bad_rows(loaded)
                if not self._skip_bad:
                    imports.give_up(self._broker, self._plan, imports.counted(bad_count))
                    raise imports.BadRows(" ".join(imports.bad_lines(bad, bad_count)))
                imports.write_bad(self._skip_bad, bad)
            imports.adopt(self._broker, self._plan, [file for part in loaded for file in part.files], bad_count)
        if self._is_waiting:
            imports.wait(self._broker, self._id)

    def abort(self, messages: list[Any]) -> None:  # noqa: ARG002 - Spark's name
        """Gives the import up. One that was adopted stays: its commit has failed while it waited."""
        if self._plan is not None:
            imports.give_up(self._broker, self._plan, "the job of Spark has failed")
