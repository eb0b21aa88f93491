"""The secret that proves to a broker that a process is its own bulk or pipeline.

The broker makes it with its data folder. Bulk and the embedded pipeline read it there; a pipeline that runs elsewhere
gets it from its operator, in a file or in the environment. It signs requests like a user's secret, as the user
`pipeline`, so it is never sent.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from postdate.errors import UsageError

TOKEN_USER = "pipeline"  # no user of an operator's can have this name
TOKEN_FILE = "token"  # in the data folder
ENVIRONMENT_TOKEN, ENVIRONMENT_TOKEN_FILE = "POSTDATE_TOKEN", "POSTDATE_TOKEN_FILE"
_BYTES = 32
_OWNER_ONLY = 0o600


def open_token(folder: Path) -> str:
    """Returns the token of a data folder, and makes one where there is none. Raises UsageError for a damaged one."""
    path = folder / TOKEN_FILE
    if not path.exists():
        made = folder / f"{TOKEN_FILE}.new"
        made.unlink(missing_ok=True)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)
    path.chmod(_OWNER_ONLY)
    return read_token(path)


def read_token(path: Path) -> str:
    """Reads a token from a file. Raises UsageError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"the token file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the token file {path} holds no token, but bytes that are no text") from error
    if len(token) != 2 * _BYTES or not set(token) <= set("0123456789abcdef"):
        raise UsageError(
            f"the token file {path} holds no token, expected {2 * _BYTES} digits from 0 to f; remove it, and the "
            "broker makes another when it starts"
        )
    return token


def find_token(environ: Mapping[str, str], file: str | None = None) -> str:
    """Returns the token that an operator gave a process: in a file named by a flag, in the environment, or in a file
    that the environment names; empty where there is none. Raises UsageError.
    """
    if file:
        return read_token(Path(file))
    if environ.get(ENVIRONMENT_TOKEN):
        return environ[ENVIRONMENT_TOKEN].strip()
    named = environ.get(ENVIRONMENT_TOKEN_FILE)
    return read_token(Path(named)) if named else ""
