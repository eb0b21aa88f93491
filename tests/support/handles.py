"""Recall handles as texts."""

from postdate.wire.ids import encode_recall_handle


def recall_handle(topic: str, broker_name: str, due_at_ms: int, unique_key: str) -> str:
    return encode_recall_handle(topic, broker_name, due_at_ms, unique_key).decode()
