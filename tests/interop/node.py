"""The package ali-ons for Node, from npm's registry."""

import hashlib
from pathlib import Path

from program import HERE, PLAIN, SHORT, Access, Language, Program, fetch

FOLDER = HERE / "node"

# Long ones first.
PROGRAMS = (
    Program("killed and restarted", "Restart", PLAIN),
    Program("retries and dead letters", "Retries", SHORT),
    Program("messages: keys, tags, broadcast", "Messages", PLAIN, is_always_signed=True),
    Program("delays", "Delays", SHORT),
)


def build() -> None:
    fetch_packages(FOLDER)


def fetch_packages(folder: Path) -> None:
    """What a folder's lock file names; not again while it stays the same."""
    stamped = folder / "node_modules" / "stamp"
    stamp = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    if stamped.is_file() and stamped.read_text() == stamp:
        return
    fetch(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retry-maxtimeout=20000"], folder)
    stamped.write_text(stamp)


def command(program: Program, route: str, _: Path, __: Access) -> list[str]:
    return ["node", str(FOLDER / f"{program.name.lower()}.js"), route]


LANGUAGE = Language(
    "node", "ali-ons 3.12.0", {"node": "nodejs", "npm": "npm"}, build, command, PROGRAMS, "it has no TLS"
)
