"""What is fixed for the life of a data folder, in two small files.

FORMAT      which format it has: {"format": 1, "segment_bytes": 67108864, "queue_file_rows": 1048576, ...}
IDENTITY    128 random bits as 32 hexadecimal digits, which tell its broker from all others: the table has them too
"""

import json
import re
import secrets

from postdate.access.token import TOKEN_FILE
from postdate.access.users import AUTH_FILE
from postdate.access.users import LOCK_FILE as AUTH_LOCK_FILE
from postdate.config import Limits, Settings
from postdate.errors import ForeignFolder
from postdate.storage.disk import Disk
from postdate.tls import CERTIFICATE_FILE, KEY_FILE

FORMAT = 1
FORMAT_FILE, IDENTITY_FILE = "FORMAT", "IDENTITY"
# What a folder may have before a broker has opened it: `postdate user init` makes the first users there.
_BEFORE_FORMAT = frozenset(
    {
        "LOCK",
        FORMAT_FILE + ".new",
        TOKEN_FILE,
        TOKEN_FILE + ".new",
        AUTH_FILE,
        AUTH_FILE + ".new",
        AUTH_LOCK_FILE,
        CERTIFICATE_FILE,
        KEY_FILE,
    }
)
FIXED_SETTINGS = ("segment_bytes", "queue_file_rows", "far_block_rows")


def open_folder(disk: Disk, settings: Settings, limits: Limits) -> dict[str, int]:
    """Reads, or writes into an empty folder, what is fixed for a folder's life. Raises ForeignFolder."""
    refuse_foreign(disk)
    if disk.size(FORMAT_FILE) >= 0:
        return read_format(disk)
    fixed = fixed_of(settings, limits)
    write_format(disk, fixed)
    return fixed


def fixed_of(settings: Settings, limits: Limits) -> dict[str, int]:
    """What is fixed for the life of a new folder."""
    sizes = (settings.segment_bytes, limits.queue_file_rows, limits.far_block_rows)
    return {"format": FORMAT} | dict(zip(FIXED_SETTINGS, sizes, strict=True))


def write_format(disk: Disk, fixed: dict[str, int]) -> None:
    """Makes a folder one that a broker opens."""
    _write(disk, FORMAT_FILE, json.dumps(fixed))


def open_identity(disk: Disk, identity: str = "") -> str:
    """Reads the identity of a folder. One that has none yet, as those of earlier versions, gets the given one, or a
    random one. Raises ForeignFolder.
    """
    found = read_identity(disk)
    if found:
        return found
    identity = identity or secrets.token_hex(16)
    _write(disk, IDENTITY_FILE, identity)
    return identity


def read_identity(disk: Disk) -> str:
    """Returns the identity of a folder; empty where it has none yet. Raises ForeignFolder."""
    if disk.size(IDENTITY_FILE) < 0:
        return ""
    text = disk.read(IDENTITY_FILE, 0, 4_096)
    if not re.fullmatch(rb"[0-9a-f]{32}", text):
        raise ForeignFolder(f"the file {IDENTITY_FILE} holds {text[:40]!r}, no identity: restore it from a copy")
    return text.decode()


def _write(disk: Disk, name: str, text: str) -> None:
    """Writes a small file, whole or not at all, durable on return."""
    disk.write(name + ".new", 0, text.encode())
    disk.sync(name + ".new")
    disk.rename(name + ".new", name)
    disk.sync_folder("")


def refuse_foreign(disk: Disk) -> None:
    """Raises ForeignFolder for a folder that holds something, but nothing of ours. Changes nothing, not even a lock."""
    names = [name for name in disk.list("") if name not in _BEFORE_FORMAT]
    if IDENTITY_FILE in names and FORMAT_FILE not in names:
        raise ForeignFolder(
            f"the folder has a file {IDENTITY_FILE} but no file {FORMAT_FILE}: the adoption of a table was cut short; "
            "repeat it with: postdate table adopt"
        )
    if names and FORMAT_FILE not in names:
        raise ForeignFolder(
            f"the folder holds {names[0]!r} but no file {FORMAT_FILE}: it is not a Postdate folder; "
            "give the broker an empty one"
        )


def read_format(disk: Disk) -> dict[str, int]:
    """What the file says. Raises ForeignFolder."""
    text = disk.read(FORMAT_FILE, 0, 4_096)
    try:
        fixed = json.loads(text)
        found = {name: int(fixed[name]) for name in ("format", *FIXED_SETTINGS)}
    except (ValueError, KeyError, TypeError) as error:
        raise ForeignFolder(f"the file {FORMAT_FILE} is not readable ({error}): restore it from a copy") from error
    if found["format"] > FORMAT:
        raise ForeignFolder(
            f"the folder has format {found['format']}, this program knows up to {FORMAT}: "
            "it was written by a newer Postdate, use that"
        )
    return found
