"""Retries: how often and when a group's messages are tried again, and their copies in retry and dead letter topics.

A group's settings may name the delays and the number of tries; without them those of the broker hold: RocketMQ's delay
levels from the third on, and retry_times_max.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from postdate.broker.broker import Broker
from postdate.errors import UsageError
from postdate.message import (
    DELAY_PROPERTIES,
    NOT_OF_COPIES,
    PROPERTIES_BYTES_MAX,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REASON,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    Message,
    decode_properties,
    encode_properties,
)
from postdate.storage.record import Record

DELAYS_SETTING = "retryDelaysMs"  # of a group, ours: before the second try, the third, ...; the last holds for the rest
TIMES_SETTING = "retryMaxTimes"  # of a group, RocketMQ's: how often a message is tried after the first time
_DELAYS_MAX = 100
_NOT_SENT_ON = DELAY_PROPERTIES | NOT_OF_COPIES
_FIRST_LEVEL = 3  # 10 s by default; each further retry is one level later


def retry_times_max(broker: Broker, group: str, asked: int | None) -> int:
    """Returns how often a group's message is tried again before it is a dead letter: as its consumer asks, else by the
    group's settings, else by the broker's.
    """
    if asked is None or asked < 0:
        asked = broker.view.group_settings(group).get(TIMES_SETTING)
    return asked if isinstance(asked, int) and asked >= 0 else broker.settings.retry_times_max


def own_delays_ms(broker: Broker, group: str) -> list[int]:
    """Returns the delays of a group's settings; empty where it has none."""
    return list(broker.view.group_settings(group).get(DELAYS_SETTING) or ())


def retry_delays_ms(broker: Broker, group: str) -> list[int]:
    """Returns the delays before a group's second try of a message, its third, and so on."""
    levels, limit_ms = broker.levels, broker.settings.invisible_ms_max
    by_level = [levels.delay_ms(level) for level in range(_FIRST_LEVEL, max(levels.count, _FIRST_LEVEL) + 1)]
    return [min(delay_ms, limit_ms) for delay_ms in own_delays_ms(broker, group) or by_level]


def check_retry_settings(name: str, settings: Mapping[str, Any], delay_ms_max: int) -> None:
    """Raises UsageError for delays of a group that are none."""
    delays_ms = settings.get(DELAYS_SETTING)
    if delays_ms is None:
        return
    if not isinstance(delays_ms, list) or not 1 <= len(delays_ms) <= _DELAYS_MAX:
        raise UsageError(f"{DELAYS_SETTING} of group {name!r} must be a list of 1 to {_DELAYS_MAX} delays")
    for delay_ms in delays_ms:
        if type(delay_ms) is not int or not 0 <= delay_ms <= delay_ms_max:
            raise UsageError(
                f"{DELAYS_SETTING} of group {name!r} has {delay_ms!r}, expected 0 to {delay_ms_max} (invisible_ms_max)"
            )


def delay_properties(broker: Broker, group: str, level: int, times: int) -> dict[str, str]:
    """Returns the properties that delay what a consumer sends back: by the level that it asks for, else by the delays
    of the group, else by a level that grows with the number of tries before.
    """
    delays_ms = own_delays_ms(broker, group)
    if level or not delays_ms:
        return {PROPERTY_DELAY: str(level or _FIRST_LEVEL + times)}
    delay_ms = delays_ms[min(times, len(delays_ms) - 1)]
    return {PROPERTY_TIMER_DELAY_MS: str(delay_ms)} if delay_ms else {}


def retry_message(
    record: Record, topic: str, origin_id: str, times: int, more: dict[str, str], *, reason: str = "",
    origin: str = "",
) -> Message:  # fmt: skip
    """Returns the message of a record for a retry or dead letter topic, tried `times` times, with more properties: why
    it failed, and the queue and offset that it came from at first, where they are known.
    """
    properties = sent_on(record.properties)
    properties.setdefault(PROPERTY_RETRY_TOPIC, record.topic)
    properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, origin_id)
    if origin:
        properties.setdefault(PROPERTY_ORIGIN, origin)
    encoded = encode_properties(properties | more | ({PROPERTY_REASON: reason} if reason else {}))
    if reason and len(encoded) > PROPERTIES_BYTES_MAX:  # the message is worth more than why it failed
        encoded = encode_properties(properties | more)
    return Message(
        topic, record.body, encoded, 0, record.flag, record.sys_flag, record.born_at_ms, record.born_host, times
    )


def clean_reason(text: str) -> str:
    """Returns a reason as a property can carry it."""
    readable = text.replace("\x01", " ").replace("\x02", " ").strip()
    return readable.encode(errors="replace").decode()


def sent_on(properties: bytes) -> dict[str, str]:
    """Returns the properties of a message that is sent on: it does not wait a second time, and its id is not taken by
    a copy.
    """
    return {name: value for name, value in decode_properties(properties).items() if name not in _NOT_SENT_ON}


def one_delay(broker: Broker, group: str, asked_ms: int) -> Sequence[int]:
    """Returns the delays that a consumer asks for: its own, or those of its group where it names none."""
    return [asked_ms] if asked_ms >= 0 else retry_delays_ms(broker, group)
