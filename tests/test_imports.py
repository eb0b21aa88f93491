"""Holds the direction of imports: who may know whom, and who may touch sockets, threads and clocks.

The table below is the architecture in one glance. A new module gets its place here first. The checker reads sources
and runs nothing, so it also sees imports inside functions and under TYPE_CHECKING. It does not see importlib.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "postdate"
ROOT = Path(__file__).parent.parent

# A part is a module or a folder directly under postdate/. It may import only parts of rows above its own.
# The rows from topics to broker are one row of the design. It is split so that their direction is held too: the fold's
# parts know nothing of the fold, the fold nothing of how it is saved or fed (recovery, intake), and neither of these
# anything of the broker that drives them all. The client stands apart from them, behind the core: it holds sockets.
ROWS: tuple[tuple[str, ...], ...] = (
    ("__init__",),  # Every import of ours runs it, so it may know none of us, but for what it gives, on its first use.
    ("message", "errors", "config", "clock", "keys", "arrays"),
    ("log", "wheel", "wire", "table_format"),
    ("topics", "tombstones", "far", "groups", "pops", "index", "jobs", "holds", "bursts"),
    ("verdicts", "takings", "decisions", "columns"),
    ("fold",),
    ("recovery", "intake", "handout", "reader"),
    # What a kept snapshot still needs, what a message is, how a batch comes to the fold.
    ("retention", "lookup", "writer"),
    ("leases", "staging", "commands", "rescues", "cancels", "definitions"),
    ("broker",),
    ("client", "manners", "counts"),  # Before the server: pipeline, console and command line may use them.
    ("check", "server", "bulk", "pipeline", "console"),
    ("simulation", "faults", "spark"),
    ("cli", "__main__"),
)
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}

# Inside a row nobody knows another, but for these. Modules of one folder are one part and may know each other. The
# package gives the client's names as its own (postdate.connect), and pending, and loads them when they are first used.
# An answer to a pull carries records as the log has them, so that the wire reads them by the log's layout. Rows of a
# chunk have the flags of the table's.
NEIGHBOURS = {
    ("message", "errors"),
    ("config", "errors"),
    ("__main__", "cli"),
    ("__init__", "client"),
    ("__init__", "pipeline"),
    ("wire", "log"),
    ("log", "table_format"),
}

# What a row alone cannot say: whoever talks to a broker over a socket does not reach into one.
STRANGERS = {("client", "broker"), ("client", "fold"), ("client", "log")}

# The core takes bytes and instants as arguments: everything down to the broker.
CORE_ROW_LAST = ROW_OF["broker"]
OUTSIDE_WORLD = {
    "sockets": {"socket", "socketserver", "ssl", "select", "selectors"},
    "event loops": {"asyncio", "uvloop"},
    "threads and processes": {"threading", "_thread", "concurrent", "multiprocessing", "subprocess"},
    "clocks": {"time", "sched"},
}
WORLD_OF = {module: world for world, modules in OUTSIDE_WORLD.items() for module in modules}
CORE_EXCEPTIONS = {
    ("clock", "time"),  # The one place that reads the time.
    ("log", "threading"),  # The helper thread that zeroes the next segment.
}
DATETIME_READS = {"now", "utcnow", "today"}  # Computing with a datetime is fine, asking it for the time is not.


class Import(NamedTuple):
    line: int
    base: tuple[str, ...]  # ("postdate", "log") in "from postdate.log import queue"
    names: tuple[str, ...]  # ("queue",); empty in "import postdate.log"


def part_of(path: Path) -> str:
    """The part that holds a file, given its path from the root of the repository."""
    return Path(path.parts[1]).stem


def imports_of(tree: ast.AST, path: Path) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, tuple(alias.name.split(".")), ())
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.lineno, base_of(node, path), tuple(alias.name for alias in node.names))


def base_of(node: ast.ImportFrom, path: Path) -> tuple[str, ...]:
    """What stands between "from" and "import", with leading dots resolved against the importing file."""
    named = tuple(node.module.split(".")) if node.module else ()
    if node.level == 0:
        return named
    # One dot is the folder of the file, for an __init__.py as for a module; each further dot is one folder up.
    folders = path.parent.parts
    return folders[: max(0, len(folders) - (node.level - 1))] + named


def parts_imported(found: Import) -> Iterator[str]:
    """The parts of ours that an import reaches; none for a foreign one."""
    if found.base[:1] != (PACKAGE,):
        return
    if len(found.base) > 1:
        yield found.base[1]
    elif found.names:
        # "from postdate import wheel" means a part, "from postdate import __version__" the package itself.
        yield from (name if name in ROW_OF else "__init__" for name in found.names)
    else:
        yield "__init__"


def why_not(part: str, target: str) -> str | None:
    """The reason why a part may not import another, or None if it may."""
    if target not in ROW_OF:
        return "which is not in the table of tests/test_imports.py"
    if (part, target) in STRANGERS:
        return "which it knows over the wire alone"
    if part == target or (part, target) in NEIGHBOURS or ROW_OF[target] < ROW_OF[part]:
        return None
    if ROW_OF[target] == ROW_OF[part]:
        return "which stands in the same row; neighbours do not know each other"
    return "which stands in a row below; a module imports only from rows above its own"


def complaints(path: Path, source: str) -> list[str]:
    """One sentence for each rule that a file breaks."""
    part = part_of(path)
    if part not in ROW_OF:
        return [f"{path}: {part} is not in the table of tests/test_imports.py; give it a row"]
    tree = ast.parse(source, str(path))
    found = list(imports_of(tree, path))
    return [
        *direction_complaints(path, part, found),
        *foreign_complaints(path, part, found),
        *datetime_complaints(path, part, found, tree),
    ]


def direction_complaints(path: Path, part: str, found: list[Import]) -> Iterator[str]:
    for each in found:
        if not each.base:
            yield f"{path}:{each.line}: {part} imports from above the package"
        for target in parts_imported(each):
            reason = why_not(part, target)
            if reason:
                yield f"{path}:{each.line}: {part} imports {target}, {reason}"


def foreign_complaints(path: Path, part: str, found: list[Import]) -> Iterator[str]:
    for each in found:
        module = each.base[0] if each.base else ""
        if module == "pyspark" and part != "pipeline":
            yield f"{path}:{each.line}: {part} imports pyspark, which only pipeline may"
        if module in WORLD_OF and ROW_OF[part] <= CORE_ROW_LAST and (part, module) not in CORE_EXCEPTIONS:
            yield f"{path}:{each.line}: {part} imports {module}, but the core has no {WORLD_OF[module]}"


def datetime_complaints(path: Path, part: str, found: list[Import], tree: ast.AST) -> Iterator[str]:
    if ROW_OF[part] > CORE_ROW_LAST or not any(each.base[:1] == ("datetime",) for each in found):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DATETIME_READS:
            yield f"{path}:{node.lineno}: {part} reads the time by {node.attr}(), but only clock reads the time"


# The repository itself.


def test_every_module_keeps_the_table() -> None:
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert paths, f"no module found under {ROOT / PACKAGE}"
    broken = [line for path in paths for line in complaints(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]
    assert not broken, "\n".join(broken)


def test_a_part_stands_in_one_row_only() -> None:
    assert len(ROW_OF) == sum(len(parts) for parts in ROWS)


# The checker, on small sources.

ALLOWED = [
    ("postdate/message.py", "from postdate.errors import UsageError"),
    ("postdate/config.py", "from .errors import UsageError"),
    ("postdate/clock.py", "import time"),
    ("postdate/wheel.py", "import numpy as np\nfrom postdate import message"),
    ("postdate/wheel.py", "from postdate import __version__"),
    ("postdate/wheel.py", "from datetime import timedelta"),
    ("postdate/wheel.py", "def f(clock): return clock.now()"),
    ("postdate/log/segment.py", "import threading\nfrom postdate.log.record import Record\nfrom . import batch"),
    ("postdate/log/segment.py", "from ..errors import CorruptLog\nfrom .. import message"),
    ("postdate/log/__init__.py", "from .segment import Segment\nfrom ..config import Config"),
    ("postdate/fold.py", "import postdate.log.queue as queue"),
    ("postdate/server.py", "import asyncio, socket, time\nfrom postdate.broker import Broker"),
    ("postdate/recovery.py", "from postdate.fold import Fold\nfrom postdate.log import snapshot"),
    ("postdate/retention.py", "from postdate.recovery import Kept"),
    ("postdate/broker.py", "from postdate import intake, recovery, retention"),
    ("postdate/client.py", "import asyncio, socket, time\nfrom postdate.wire import frame"),
    ("postdate/pipeline/source.py", "from postdate.client import Client"),
    ("postdate/check/folder.py", "from postdate import recovery\nfrom postdate.check.findings import Finding"),
    ("postdate/simulation/__main__.py", "from postdate.simulation.history import run_seed\nimport concurrent.futures"),
    ("postdate/__main__.py", "from postdate.cli import main"),
    ("postdate/pipeline/source.py", "from pyspark.sql import SparkSession"),
    ("postdate/simulation/history.py", "from postdate.check import check\nimport datetime\ndatetime.date.today()"),
    ("postdate/cli.py", "def main():\n    from postdate.server import serve"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert complaints(Path(path), source) == []


REFUSED = [
    # Upwards, in every form of import.
    ("postdate/broker.py", "from postdate.server import serve", "broker imports server, which stands in a row below"),
    ("postdate/broker.py", "from postdate import cli", "broker imports cli"),
    ("postdate/broker.py", "import postdate.cli", "broker imports cli"),
    ("postdate/broker.py", "import os, postdate.cli as c", "broker imports cli"),
    ("postdate/broker.py", "from . import errors, server", "broker imports server"),
    ("postdate/broker.py", "from .server import serve", "broker imports server"),
    ("postdate/log/segment.py", "from ..fold import Fold", "log imports fold"),
    ("postdate/log/segment.py", "from .. import fold", "log imports fold"),
    ("postdate/log/__init__.py", "from ..fold import Fold", "log imports fold"),
    ("postdate/log/deep/leaf.py", "from ...fold import Fold", "log imports fold"),
    ("postdate/fold.py", "def f():\n    from postdate.broker import Broker", "fold.py:2: fold imports broker"),
    ("postdate/fold.py", "if TYPE_CHECKING:\n    from postdate.broker import Broker", "fold imports broker"),
    ("postdate/fold.py", "try:\n    import postdate.broker\nexcept ImportError:\n    pass", "fold imports broker"),
    ("postdate/__init__.py", "from postdate.broker import Broker", "__init__ imports broker"),
    ("postdate/errors.py", "from postdate.message import Message", "errors imports message"),
    ("postdate/fold.py", "from postdate.recovery import take", "fold imports recovery, which stands in a row below"),
    (
        "postdate/recovery.py",
        "from postdate.broker import Broker",
        "recovery imports broker, which stands in a row below",
    ),
    (
        "postdate/recovery.py",
        "from postdate import retention",
        "recovery imports retention, which stands in a row below",
    ),
    ("postdate/check/folder.py", "from postdate.simulation import VirtualDisk", "check imports simulation"),
    ("postdate/simulation/world.py", "from postdate.cli import main", "simulation imports cli"),
    ("postdate/client.py", "from postdate.broker import Broker", "client imports broker, which it knows over the wire"),
    # Sideways.
    ("postdate/recovery.py", "from postdate.intake import Intake", "recovery imports intake, which stands in the same"),
    ("postdate/cli.py", "from postdate.__main__ import main", "cli imports __main__, which stands in the same row"),
    ("postdate/wheel.py", "from postdate.log import Log", "wheel imports log, which stands in the same row"),
    ("postdate/clock.py", "from postdate.errors import UsageError", "clock imports errors, which stands in the same"),
    ("postdate/server.py", "from postdate.pipeline import run", "server imports pipeline, which stands in the same"),
    # Nowhere.
    ("postdate/gadget.py", "", "gadget is not in the table"),
    ("postdate/gadgets/part.py", "", "gadgets is not in the table"),
    ("postdate/broker.py", "import postdate.gadget", "broker imports gadget, which is not in the table"),
    ("postdate/broker.py", "from .. import secrets", "broker imports from above the package"),
    ("postdate/log/log.py", "from .... import secrets", "log imports from above the package"),
    # The outside world.
    ("postdate/server.py", "import pyspark", "server imports pyspark, which only pipeline may"),
    ("postdate/cli.py", "def f():\n    from pyspark.sql import SparkSession", "cli imports pyspark"),
    ("postdate/wire/frame.py", "import socket", "wire imports socket, but the core has no sockets"),
    ("postdate/groups.py", "import asyncio", "groups imports asyncio, but the core has no event loops"),
    ("postdate/broker.py", "from threading import Lock", "broker imports threading, but the core has no threads"),
    ("postdate/broker.py", "import concurrent.futures", "broker imports concurrent"),
    ("postdate/recovery.py", "import threading", "recovery imports threading, but the core has no threads"),
    ("postdate/wheel.py", "from time import monotonic_ns", "wheel imports time, but the core has no clocks"),
    ("postdate/log/log.py", "import time", "log imports time, but the core has no clocks"),
    ("postdate/clock.py", "import threading", "clock imports threading"),
    ("postdate/fold.py", "from datetime import datetime\ndatetime.now()", "fold reads the time by now()"),
    ("postdate/fold.py", "import datetime as d\nf = d.datetime.utcnow", "fold reads the time by utcnow()"),
]


@pytest.mark.parametrize(("path", "source", "sentence"), REFUSED)
def test_a_refused_import_is_named(path: str, source: str, sentence: str) -> None:
    found = complaints(Path(path), source)
    assert len(found) == 1
    assert sentence in found[0]
    assert found[0].startswith(path)


def test_every_broken_rule_of_a_file_is_told() -> None:
    source = "import time\nfrom postdate import cli, log\nfrom postdate.server import serve"
    assert len(complaints(Path("postdate/wheel.py"), source)) == 4
