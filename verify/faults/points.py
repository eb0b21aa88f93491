"""Finds the fault points, the names given to `reach`, by reading the source. There is no list to extend."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import postdate
from verify.faults.control import BROKER, BULK, PIPELINE

PACKAGE = Path(postdate.__file__).parent
_IN_PIPELINE = {"spark", "table"}  # folders whose points the pipeline's processes reach
# Reached by commands, and by requests that no story has: tests/test_adoption.py and tests/access/test_users.py end
# them.
_OF_COMMANDS = {"adoption.py", "users.py"}
# Bulk reaches these points of the storage, which writes chunks and selections for it.
WRITTEN_BY_BULK = {
    "chunk.write", "chunk.add", "chunk.synced", "chunk.written",
    "selection.write", "selection.synced", "selection.written",
}  # fmt: skip


class Point(NamedTuple):
    """A name, and the process that reaches it: "broker", "bulk" or "pipeline", which includes Spark's workers."""

    name: str
    process: str


def fault_points() -> list[Point]:
    """All fault points of broker, bulk and pipeline, sorted."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.name not in _OF_COMMANDS]
    return sorted({point for path in sources for point in _points_in(path)})


def points_of_the_core() -> set[str]:
    """The names that storage, state and bulk reach: those that the simulation can kill at."""
    return {point.name for point in fault_points() if point.process != PIPELINE}


def _points_in(path: Path) -> Iterator[Point]:
    source = path.read_text(encoding="utf-8")
    if "reach(" in source:
        folder = path.relative_to(PACKAGE).parts[0]
        for name in points_of(ast.parse(source, str(path))):
            yield Point(name, _process_of(folder, name))


def _process_of(folder: str, name: str) -> str:
    if folder in _IN_PIPELINE:
        return PIPELINE
    return BULK if folder == BULK or name in WRITTEN_BY_BULK else BROKER


class Turns:
    """Chooses the points to kill at next: several that had no kill yet, and the first one that is reached kills. So no
    time is lost waiting for rare points, and they get their turn all the same.
    """

    def __init__(self, processes: Collection[str] = (BROKER, BULK, PIPELINE)) -> None:
        self.all = {point for point in fault_points() if point.process in processes}
        self.hit: set[Point] = set()
        self._left, self._rare = set(self.all), set[Point]()

    def next(self, dice: Random) -> list[Point]:
        """Half of the points that one process has left, and all rare ones. Only one process, because the broker would
        always be first; only half, because the most frequent points would always come in the same order.
        """
        self._left = self._left or set(self.all)  # every point had a turn or is rare: start again
        process = dice.choice(sorted({point.process for point in self._left}))
        left = sorted(point for point in self._left if point.process == process)
        return sorted(self._rare.union(dice.sample(left, (len(left) + 1) // 2)))

    def note_hit(self, point: Point) -> None:
        self.hit.add(point)
        self._left.discard(point)
        self._rare.discard(point)

    def note_missed(self, points: Collection[Point]) -> None:
        """None of these points was reached in time: they are rare, and are part of every later choice."""
        self._rare |= set(points) - self.hit
        self._left -= self._rare


# -- in one module ----------------------------------------------------------------------------------------------


def points_of(tree: ast.Module) -> Iterator[str]:
    """The names given to `reach` in a module, also where a function passes on a name that it is given."""
    passed_on = {
        (function.name, suffix)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in _calls_of(function, "reach")
        if (suffix := _suffix_of(call.args[0], function)) is not None
    }
    for call in _calls_of(tree, "reach"):
        if isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)
    for name, suffix in passed_on:
        for call in _calls_of(tree, name):
            assert isinstance(call.args[0], ast.Constant), f"line {call.lineno}: the point's name is not written here"
            yield str(call.args[0].value) + suffix


def _calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or a method of this name."""
    return [call for call in ast.walk(tree) if isinstance(call, ast.Call) and name == _name_of(call.func)]


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _suffix_of(argument: ast.expr, function: ast.FunctionDef) -> str | None:
    """The text that is appended to a parameter; None if the argument is a literal name."""
    if isinstance(argument, ast.Constant):
        return None
    parameters = {each.arg for each in function.args.args}
    if isinstance(argument, ast.Name) and argument.id in parameters:
        return ""
    assert isinstance(argument, ast.BinOp), f"line {argument.lineno}: a point is a literal, a parameter, or both added"
    assert isinstance(argument.left, ast.Name)
    assert argument.left.id in parameters
    assert isinstance(argument.right, ast.Constant)
    return str(argument.right.value)
