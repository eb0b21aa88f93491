"""When messages were due by what their properties meant when they were stored: `message.due` for many at once.

What is not a plain number, or is so large that a sum might not fit, is left to that function, one by one.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.properties import Properties
from postdate.message import (
    INT64_MAX,
    PROPERTY_DELAY,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    DelayLevels,
    due_and_level,
)

_LARGE = 1 << 52  # of a number, so that a thousand times it is still one of 64 bits


class Dues(NamedTuple):
    due: np.ndarray  # 0: at once
    level: np.ndarray


class _Unusual(Exception):
    """A number that is not plain."""


def dues(properties: Properties, stored_at: np.ndarray, levels: DelayLevels) -> Dues:
    """Raises IllegalMessage for properties that no message can have been stored with."""
    try:
        return _plain_dues(properties, stored_at, levels)
    except _Unusual:
        rows = zip(properties.decoded(), stored_at.tolist(), strict=True)
        each = [due_and_level(named, at_ms, levels, INT64_MAX) for named, at_ms in rows]
        both = np.array(each, np.int64).reshape(-1, 2)
        return Dues(both[:, 0].copy(), both[:, 1].astype(np.uint8))


def _plain_dues(properties: Properties, stored_at: np.ndarray, levels: DelayLevels) -> Dues:
    """From the last to the first: what stands first decides."""
    at = np.zeros(len(stored_at), np.int64)
    for name, unit, is_span in (
        (PROPERTY_START_DELIVER_TIME, 1, False),
        (PROPERTY_TIMER_DELIVER_MS, 1, False),
        (PROPERTY_TIMER_DELAY_MS, 1, True),
        (PROPERTY_TIMER_DELAY_SEC, 1_000, True),
    ):
        number, is_there = _numbers(properties.value(name))
        if is_there.any():
            at = np.where(is_there, number * unit + (stored_at if is_span else 0), at)
    number, is_there = _numbers(properties.value(PROPERTY_DELAY))
    level = np.where(is_there, np.clip(number, 0, levels.count), 0)
    if level.any():
        at = np.where(level > 0, stored_at + np.array([0, *levels.delays_ms])[level], at)
    return Dues(np.where(at > stored_at, at, 0), level.astype(np.uint8))


def _numbers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, 0 where there is none, and where there is one. Raises _Unusual."""
    if text.null_count == len(text):
        return np.zeros(len(text), np.int64), np.zeros(len(text), bool)
    try:
        number: np.ndarray = text.cast(pa.int64()).fill_null(0).to_numpy()
    except pa.ArrowInvalid as error:
        raise _Unusual from error
    if ((number > _LARGE) | (number < -_LARGE)).any():
        raise _Unusual
    return number, text.is_valid().to_numpy(False)
