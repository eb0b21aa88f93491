"""What a peer is shown of places and secrets: paths, URIs, credentials.

Nobody is shown credentials in a URI. Who asks from this machine sees whole paths, as its operator does; over the
network a place is its scheme and its last part: enough to recognize it, and nothing to attack.
"""

import dataclasses
import re
from ipaddress import IPv6Address, ip_address
from typing import Any

from postdate.config import Settings
from postdate.message import Host

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=\w)\?[^\s,;)]*=[^\s,;)]*")  # of a URI: signatures, keys, options of a storage
_PATH = re.compile(r"(?<![\w/:.<-])(?:[a-z][a-z0-9+.-]*://[^\s,;()'\"]+|/[^\s,;:()'\"]+)")
_HIDDEN = "..."


def is_local(host: Host) -> bool:
    """Whether a peer is on this machine."""
    address = ip_address(host.address)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def hide_credentials(text: str) -> str:
    """Returns a text without the credentials in its URIs; for logs, and for everybody."""
    return _QUERY.sub(f"?{_HIDDEN}", _CREDENTIALS.sub(f"{_HIDDEN}@", text))


def mask(value: Any, host: Host) -> Any:
    """Returns an answer, of plain values, as a peer is shown it."""
    if isinstance(value, str):
        shown = hide_credentials(value)
        return shown if is_local(host) else _PATH.sub(lambda found: shorten(found[0]), shown)
    if isinstance(value, dict):
        return {name: mask(each, host) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [mask(each, host) for each in value]
    return value


def shorten(place: str) -> str:
    """Returns the scheme and the last part of a path or a URI."""
    scheme, mark, path = place.rpartition("://")
    last = path.rstrip("/").rpartition("/")[2]
    return f"{scheme}{mark}{_HIDDEN}/{last}" if last else place


def mask_settings(settings: Settings, host: Host) -> dict[str, Any]:
    """Returns all settings by name. A setting that names a place may name it from the broker's folder."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: _mask_setting(value, host) for name, value in values.items()}


def _mask_setting(value: Any, host: Host) -> Any:
    if not isinstance(value, str):
        return value
    shown = hide_credentials(value)
    return shown if is_local(host) or "/" not in shown else shorten(shown)
