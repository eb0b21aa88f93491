"""Recall handles, as RocketMQ and Postdate give them out."""

from postdate.wire.ids import encode_recall_handle, parse_recall_handle


def other_key(handle: str) -> str:
    """A recall handle that differs in its unique key."""
    known = parse_recall_handle(handle)
    return encode_recall_handle(known.topic, known.broker_name, known.due_at_ms, known.unique_key[::-1]).decode()
