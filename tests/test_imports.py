"""Holds the layers: who may import whom, and who may touch sockets, threads, clocks and heavy libraries.

LAYERS is the architecture at a glance. The checker reads sources and runs nothing, so it also sees imports inside
functions and under TYPE_CHECKING. It does not see importlib.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "postdate"
ROOT = Path(__file__).parent.parent

# A part is a module or a folder directly under postdate/. It may import parts of earlier layers, and itself.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__",),  # Every import of ours runs it, so it may know none of us, but for what it gives, on its first use.
    ("errors", "clock", "keys", "faultpoint", "arrival"),
    ("contract",),
    ("spans", "process", "extras", "tls"),
    ("config", "message", "counts", "access"),
    ("storage",),
    ("state",),
    ("broker",),
    ("wire", "table"),
    ("client", "check", "adoption", "backup"),
    ("bulk",),
    ("server", "spark"),
    ("cli", "testing", "__main__"),
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

# Parts of one layer do not import each other, but for these. The package gives the client's names as its own
# (postdate.connect) and loads them on first use.
NEIGHBOURS = {
    ("__main__", "cli"),
    ("__init__", "client"),
    ("__init__", "spark"),
    ("__init__", "extras"),
}

# What a layer alone cannot say. A client knows a broker over the wire alone, and so does the table's code.
STRANGERS = {
    *((part, core) for part in ("client", "table") for core in ("broker", "state")),
    ("client", "storage"),
    ("wire", "broker"),
    ("wire", "state"),
    ("server", "bulk"),
    ("server", "state"),
    ("server", "table"),
}

CORE = {*LAYERS[1], "config", "message", "counts", "storage", "state", "broker", "wire"}
OUTSIDE_WORLD = {
    "sockets": {"socket", "socketserver", "ssl", "select", "selectors"},
    "event loops": {"asyncio", "uvloop"},
    "threads and processes": {"threading", "_thread", "concurrent", "multiprocessing", "subprocess"},
    "clocks": {"time", "sched"},
}
WORLD_OF = {module: world for world, modules in OUTSIDE_WORLD.items() for module in modules}
CORE_EXCEPTIONS = {
    ("clock", "time"),  # The one place that reads the time.
    ("storage", "threading"),  # The helper thread that zeroes the next segment.
}
DATETIME_READS = {"now", "utcnow", "today"}  # Computing with a datetime is fine, asking it for the time is not.

# Libraries of the extras, and the parts that may import them.
HEAVY = {
    "pyspark": {"spark"},
    "pyarrow": {"table", "bulk", "spark", "check"},
    "deltalake": {"table", "bulk", "spark", "check"},
    "pandas": {"spark"},
}


class Import(NamedTuple):
    line: int
    base: tuple[str, ...]  # ("postdate", "storage") in "from postdate.storage import queue"
    names: tuple[str, ...]  # ("queue",); empty in "import postdate.storage"


def part_of(path: Path) -> str:
    """Returns the part that holds a file, given its path from the root of the repository."""
    return Path(path.parts[1]).stem


def imports_of(tree: ast.AST, path: Path) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, tuple(alias.name.split(".")), ())
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.lineno, base_of(node, path), tuple(alias.name for alias in node.names))


def base_of(node: ast.ImportFrom, path: Path) -> tuple[str, ...]:
    """Returns what stands between "from" and "import", with leading dots resolved against the importing file."""
    named = tuple(node.module.split(".")) if node.module else ()
    if node.level == 0:
        return named
    # One dot is the folder of the file, for an __init__.py as for a module; each further dot is one folder up.
    folders = path.parent.parts
    return folders[: max(0, len(folders) - (node.level - 1))] + named


def parts_imported(found: Import) -> Iterator[str]:
    """Yields the parts of ours that an import reaches; none for a foreign one."""
    if found.base[:1] != (PACKAGE,):
        return
    if len(found.base) > 1:
        yield found.base[1]
    elif found.names:
        # "from postdate import wire" means a part, "from postdate import __version__" the package itself.
        yield from (name if name in LAYER_OF else "__init__" for name in found.names)
    else:
        yield "__init__"


def why_not(part: str, target: str) -> str | None:
    """Returns the reason why a part may not import another, or None if it may."""
    if target not in LAYER_OF:
        return "which is not in the table of tests/test_imports.py"
    if (part, target) in STRANGERS:
        return "which it must not know"
    if part == target or (part, target) in NEIGHBOURS or LAYER_OF[target] < LAYER_OF[part]:
        return None
    if LAYER_OF[target] == LAYER_OF[part]:
        return "which is of the same layer"
    return "which is of a layer above"


def complaints(path: Path, source: str) -> list[str]:
    """Returns one sentence for each rule that a file breaks."""
    part = part_of(path)
    if part not in LAYER_OF:
        return [f"{path}: {part} is not in the table of tests/test_imports.py; give it a layer"]
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
        if module in HEAVY and part not in HEAVY[module]:
            yield f"{path}:{each.line}: {part} imports {module}, which only {', '.join(sorted(HEAVY[module]))} may"
        if module in WORLD_OF and part in CORE and (part, module) not in CORE_EXCEPTIONS:
            yield f"{path}:{each.line}: {part} imports {module}, but the core has no {WORLD_OF[module]}"


def datetime_complaints(path: Path, part: str, found: list[Import], tree: ast.AST) -> Iterator[str]:
    if part not in CORE or not any(each.base[:1] == ("datetime",) for each in found):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DATETIME_READS:
            yield f"{path}:{node.lineno}: {part} reads the time by {node.attr}(), but only clock reads the time"


# -- cycles ------------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """Returns the dotted name of a file, given its path from the root of the repository."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of(sources: Mapping[Path, str]) -> dict[str, set[str]]:
    """Returns the modules that each module imports. An import of a module also names its packages, which give nothing
    back to their modules and are left out, unless a name is asked of a package itself.
    """
    modules = {module_of(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        targets = set()
        for found in imports_of(ast.parse(source, str(path)), path):
            base = ".".join(found.base)
            named = {f"{base}.{name}" for name in found.names} & modules
            targets |= named
            if base in modules and (len(named) < len(found.names) or not found.names):
                targets.add(base)
        # Names that the package and a folder offer are loaded on first use.
        graph[module_of(path)] = targets - {module_of(path), PACKAGE}
    return graph


def cycles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns groups of modules that import each other, directly or by way of others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return cycles


def sources() -> dict[Path, str]:
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert paths, f"no module found under {ROOT / PACKAGE}"
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


# -- the repository itself ---------------------------------------------------------------------------------------


def test_every_module_keeps_to_its_layer() -> None:
    broken = [line for path, source in sources().items() for line in complaints(path, source)]
    assert not broken, "\n".join(broken)


def test_a_part_is_of_one_layer_only() -> None:
    assert len(LAYER_OF) == sum(len(parts) for parts in LAYERS)


def test_the_server_knows_the_state_only_through_the_view_of_the_broker() -> None:
    for path, source in sources().items():
        if part_of(path) == "server":
            tree = ast.parse(source, str(path))
            reached = [
                node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "fold"
            ]
            assert not reached, f"{path}:{reached[0]} reaches for the fold; ask broker.view, or give it the question"


def test_no_modules_import_each_other() -> None:
    cycles = cycles_of(graph_of(sources()))
    assert not cycles, "\n".join(map(", ".join, cycles))


def test_sessions_of_the_server_know_no_requests() -> None:
    above = ("postdate.server.requests", "postdate.server.dispatch", "postdate.server.serve")
    sessions = {name: found for name, found in graph_of(sources()).items() if name.startswith("postdate.server.sess")}
    assert sessions
    assert not [(name, target) for name, found in sessions.items() for target in found if target.startswith(above)]


# -- the checker, on small sources -------------------------------------------------------------------------------

ALLOWED = [
    ("postdate/message.py", "from postdate.errors import UsageError"),
    ("postdate/config.py", "from .errors import UsageError"),
    ("postdate/clock.py", "import time"),
    ("postdate/state/wheel.py", "import numpy as np\nfrom postdate import message"),
    ("postdate/state/wheel.py", "from datetime import timedelta"),
    ("postdate/state/wheel.py", "def f(clock): return clock.now()"),
    ("postdate/storage/segment.py", "import threading\nfrom postdate.storage.record import Record"),
    ("postdate/storage/segment.py", "from ..errors import CorruptLog\nfrom .. import message\nfrom . import batch"),
    ("postdate/broker/broker.py", "from postdate.state.fold import Fold"),
    ("postdate/client/connection.py", "import asyncio\nimport socket"),
    ("postdate/server/serve.py", "import asyncio\nfrom postdate.broker import Broker"),
    ("postdate/spark/session/session.py", "from pyspark.sql import SparkSession"),
    ("postdate/table/files.py", "import pyarrow as pa"),
    ("postdate/cli/up.py", "from postdate import __version__\nfrom postdate.server import serve"),
    ("postdate/__main__.py", "from postdate.cli import main"),
]

REFUSED = [
    # Upwards, in every form of import.
    ("postdate/broker/broker.py", "from postdate.server import serve", "broker imports server, which is of a layer"),
    ("postdate/broker/broker.py", "from postdate import cli", "broker imports cli"),
    ("postdate/broker/broker.py", "import postdate.cli", "broker imports cli"),
    ("postdate/broker/broker.py", "from ..cli import main", "broker imports cli"),
    ("postdate/state/fold.py", "def f():\n    from postdate.broker import Broker", "fold.py:2: state imports broker"),
    ("postdate/state/fold.py", "if TYPE_CHECKING:\n    from postdate.broker import Broker", "state imports broker"),
    ("postdate/state/fold.py", "try:\n    import postdate.broker\nexcept ImportError:\n    x = 1", "state imports"),
    ("postdate/__init__.py", "from postdate.broker import Broker", "__init__ imports broker"),
    ("postdate/errors.py", "from postdate.message import Message", "errors imports message"),
    # Strangers and neighbours.
    ("postdate/client/loop.py", "from postdate.broker import Broker", "client imports broker, which it must not know"),
    ("postdate/table/find.py", "from postdate.state.fold import Fold", "table imports state, which it must not know"),
    ("postdate/server/serve.py", "from postdate.spark import session", "server imports spark, which is of the same"),
    (
        "postdate/server/serve.py",
        "from postdate.state.fold import Fold",
        "server imports state, which it must not know",
    ),
    ("postdate/clock.py", "from postdate.errors import UsageError", "clock imports errors, which is of the same layer"),
    # Nowhere.
    ("postdate/gadget.py", "", "gadget is not in the table"),
    ("postdate/gadgets/part.py", "", "gadgets is not in the table"),
    ("postdate/broker/broker.py", "import postdate.gadget", "broker imports gadget, which is not in the table"),
    ("postdate/broker/broker.py", "from ... import secrets", "broker imports from above the package"),
    # The outside world.
    ("postdate/server/serve.py", "import pyspark", "server imports pyspark, which only spark may"),
    ("postdate/cli/sql.py", "def f():\n    from pyspark.sql import SparkSession", "cli imports pyspark"),
    ("postdate/broker/jobs.py", "import pyarrow.parquet", "broker imports pyarrow, which only bulk, check"),
    ("postdate/wire/frame.py", "import socket", "wire imports socket, but the core has no sockets"),
    ("postdate/state/groups.py", "import asyncio", "state imports asyncio, but the core has no event loops"),
    ("postdate/broker/broker.py", "from threading import Lock", "broker imports threading, but the core has no thr"),
    ("postdate/broker/broker.py", "import concurrent.futures", "broker imports concurrent"),
    ("postdate/message.py", "import time", "message imports time, but the core has no clocks"),
    (
        "postdate/state/wheel.py",
        "import datetime\ndatetime.datetime.now()",
        "wheel.py:2: state reads the time by",
    ),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_these_imports_are_allowed(path: str, source: str) -> None:
    assert complaints(Path(path), source) == []


@pytest.mark.parametrize(("path", "source", "reason"), REFUSED)
def test_these_imports_are_refused(path: str, source: str, reason: str) -> None:
    found = complaints(Path(path), source)
    assert any(reason in line for line in found), found


def test_a_cycle_is_found_also_under_type_checking() -> None:
    found = cycles_of(
        graph_of(
            {
                Path("postdate/state/a.py"): "from postdate.state.b import B",
                Path("postdate/state/b.py"): "from postdate.state import c",
                Path("postdate/state/c.py"): "if TYPE_CHECKING:\n    from postdate.state.a import A",
                Path("postdate/state/d.py"): "from postdate.state.a import A",
            }
        )
    )
    assert found == [["postdate.state.a", "postdate.state.b", "postdate.state.c"]]


# Reading what these have written runs whatever the writer wants.
UNSAFE = {"cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}


def unsafe_imports(tree: ast.AST) -> set[str]:
    """Modules that make objects of bytes, as a file imports them: also from another module that has imported them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {part for name in node.names for part in name.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(name.name for name in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # import_module("pickle")
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found & UNSAFE


def test_nothing_is_read_by_pickle_or_its_like() -> None:
    """PySpark itself carries functions and the messages of data sources by pickle, between its own processes."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        assert not unsafe_imports(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import os, marshal",
        "def f():\n import dill",
        "from pyspark import cloudpickle", "import pyspark.cloudpickle", "__import__('pickle')",
        "serializers.pickle.loads",
    ],
)  # fmt: skip
def test_an_unsafe_import_is_noticed(text: str) -> None:
    assert unsafe_imports(ast.parse(text))
