"""Where the table is: what the broker's settings say, and nothing else.

Bulk, imports, queries and backups go where the broker says that the table is. A pipeline that registers names its table
too, so that a mistake is noticed; it cannot point the others to another place.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from postdate.errors import Refused
from postdate.server.masking import hide_credentials

DEFAULT_FOLDER = "table"  # in the data folder


def find_place(setting: str, data: Path) -> str:
    """Returns where the table is by the setting `table`, in a form that a process in another folder understands."""
    return _normalize(setting or str(data / DEFAULT_FOLDER))


def is_allowed(told: str, setting: str, data: Path) -> bool:
    """Whether a table is the one that the setting names, or lies in the data folder."""
    place = _normalize(told)
    if place == find_place(setting, data):
        return True
    return "://" not in place and Path(place).is_relative_to(data.resolve())


def refuse_elsewhere(told: str, setting: str, data: Path) -> None:
    """Raises Refused for a table of a pipeline that is elsewhere. It may name none: then it keeps none for others."""
    if told and not is_allowed(told, setting, data):
        shown, ours = hide_credentials(told), hide_credentials(find_place(setting, data))
        raise Refused(
            f"the pipeline's table is {shown}, but by the broker's settings it is {ours}: start the broker with "
            f"--table {shown}, or the pipeline with the broker's"
        )


def _normalize(uri: str) -> str:
    parts = urlsplit(uri)
    if "://" not in uri:
        return str(Path(uri).resolve())
    if parts.scheme == "file":
        return str(Path(unquote(parts.path)).resolve())
    return uri.rstrip("/")
