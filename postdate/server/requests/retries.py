"""A message that its consumer could not handle, as it comes again or becomes a dead letter."""

from postdate.message import (
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    Message,
    encode_properties,
)
from postdate.server.requests.send import without_delay
from postdate.storage.record import Record


def returned(record: Record, topic: str, origin_id: str, times: int, level: int = 0) -> Message:
    """The message of a record for a retry or dead letter topic: tried so many times, due after a delay level."""
    properties = without_delay(record.properties)
    properties.setdefault(PROPERTY_RETRY_TOPIC, record.topic)
    properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, origin_id)
    if level:
        properties[PROPERTY_DELAY] = str(level)
    return Message(
        topic, record.body, encode_properties(properties), 0, record.flag, record.sys_flag, record.born_at_ms,
        record.born_host, times,
    )  # fmt: skip
