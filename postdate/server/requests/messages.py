"""Single messages, by their place in the log, and the entries that point to them."""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.errors import UsageError
from postdate.message import Host
from postdate.server.connection import Connection
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command, reply

_ENTRIES_MAX = 1_024  # of a queue in one answer


class Messages:
    """Serves one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def entries(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """The entries of a queue from an index on."""
        low, high = self._broker.offsets(asked["topic"], asked["queueId"])
        index, count = asked["index"], asked["count"]
        if not index >= 0 or not 1 <= count <= _ENTRIES_MAX:
            raise UsageError(f"index {index} and count {count}, expected 0 or more and 1 to {_ENTRIES_MAX}")
        found = self._broker.view.entries(asked["topic"], asked["queueId"], max(index, low), min(index + count, high))
        rows = [{"physicOffset": place, "physicSize": size, "tagsCode": tag} for place, size, tag in found]
        body = {"maxQueueIndex": high, "minQueueIndex": low, "queueData": rows}
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))


def delivered(broker: Broker, offset: int, store_host: Host) -> bytes:
    """The record at an offset of the log as a client reads it, visible or not; empty where there is none."""
    data = broker.read_record(offset)
    if not data:
        return b""
    record, body = records.decode(data), bytearray(data)
    records.deliver(body, [(0, record.queue_offset, offset, record.stored_at_ms)], store_host)
    return bytes(body)
