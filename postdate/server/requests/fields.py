"""What a JSON body says, value by value. Raises ProtocolError that names what cannot be read."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from postdate.errors import ProtocolError


def text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name, "")
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is {value!r:.64}, expected a text")
    return value


def number(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name)
    if not is_number(value):
        raise ProtocolError(f"{name} is {value!r:.64}, expected a whole number")
    return value


def pair(said: Mapping[str, Any], name: str) -> tuple[int, int]:
    value = said.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_number, value)):
        raise ProtocolError(f"{name} is {value!r:.64}, expected two whole numbers: from and to")
    return value[0], value[1]


def is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and -(1 << 63) <= value < 1 << 63
