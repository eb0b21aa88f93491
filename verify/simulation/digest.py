"""The digest of a run: a short text that changes if the broker gives another answer or writes other bytes.

It compares two versions of the code: a change that keeps behaviour keeps the digest of every seed. So it depends on
values alone, never on the names of classes, fields and modules, except for the class of an error, which callers see.
"""

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from postdate.testing.disk import VirtualDisk

_DIGEST_BYTES = 16


class Digest:
    """Takes in the answers of one run, in their order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_DIGEST_BYTES)

    def note(self, call: str, *answers: object) -> None:
        """Takes in the answers to a call. `call` is a word of the simulation; it separates equal answers to different
        calls.
        """
        self._hash.update(ascii((call, _plain(answers))).encode())

    def note_error(self, error: BaseException) -> None:
        self.note("error", type(error).__name__)  # not its message, which may be improved

    @contextmanager
    def suppress(self, *errors: type[BaseException]) -> Iterator[None]:
        """As contextlib.suppress, and takes in the error."""
        try:
            yield
        except errors as error:
            self.note_error(error)

    def note_disk(self, disk: VirtualDisk) -> None:
        """Takes in the path and content of every file."""
        for path in disk.paths():
            content = disk.read(path, 0, disk.size(path))
            self.note("file", path, len(content))
            self._hash.update(content)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _plain(value: Any) -> Any:
    """A value as tuples of numbers, texts and bytes. An unknown type is refused: its repr could hold names."""
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return tuple([_plain(each) for each in value])
    if is_dataclass(value):
        return tuple([_plain(getattr(value, field.name)) for field in fields(value)])
    raise TypeError(f"a {type(value).__name__} has no place in a digest; note its values: {value!r:.200}")
