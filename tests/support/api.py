"""Writes docs/api.md: every public name with its signature and its docstring, as they stand in the source.

python -m tests.support.api
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
# API reference

Every public name of `postdate` and `postdate.testing`, with its signature and its docstring. [client.md](client.md) and
[testing.md](testing.md) explain the same with examples, [versions.md](versions.md) says what may change.
`python -m tests.support.api` writes this page from the source; a test notices when it is out of date.
"""
MODULES = ("postdate", "postdate.testing")
# What the blocking client asks of the asyncio client, and nobody else.
INTERNAL = {"AsyncClient.join", "AsyncClient.leave"}

Node = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Returns the page as it should be."""
    return "\n".join([HEAD, *(line for module in MODULES for line in _lines_of_module(module))]).rstrip() + "\n"


def _lines_of_module(name: str) -> Iterator[str]:
    """Functions come first, then classes, then errors, each in the order of the alphabet."""
    module = importlib.import_module(name)
    members = sorted(((public, getattr(module, public)) for public in module.__all__), key=_order)
    yield f"## {name}\n"
    for public, value in members:
        yield from _lines_of_class(public, value) if isinstance(value, type) else _lines_of_function(value)


def _order(member: tuple[str, Any]) -> tuple[int, str]:
    name, value = member
    is_class = isinstance(value, type)
    return is_class + (is_class and issubclass(value, BaseException)), name.lower()


def _lines_of_function(value: Any) -> Iterator[str]:
    """Overloads show all of their signatures."""
    home = importlib.import_module(value.__module__)
    tree = ast.parse(inspect.getsource(home))
    nodes = [node for node in tree.body if isinstance(node, Node) and node.name == value.__name__]
    overloads = [node for node in nodes if _is_decorated(node, "overload")]
    yield f"### {value.__name__}\n"
    yield from _code([_signature(node, vars(home)) for node in overloads or nodes])
    yield from _docstring(nodes[-1])


def _lines_of_class(name: str, value: type) -> Iterator[str]:
    tree, home = _tree_of(value), vars(importlib.import_module(value.__module__))
    constructor = next((node for node in tree.body if isinstance(node, Node) and node.name == "__init__"), None)
    yield f"### {name}\n"
    if issubclass(value, BaseException):
        yield from _code([f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"])
        yield from _docstring(tree)
        return
    if constructor is None:
        yield from _code([f"class {name}", *_fields(tree, value)])
        yield from _docstring(tree)
    else:
        yield from _code([f"class {name}({_arguments(constructor, home)})"])
        yield from _docstring(tree)
        yield from _docstring(constructor)
    for base in value.__mro__:
        if base.__module__.startswith("postdate."):
            home = vars(importlib.import_module(base.__module__))
            nodes = [node for node in _tree_of(base).body if isinstance(node, Node)]
            overloads = [node for node in nodes if _is_decorated(node, "overload")]
            for node in nodes:
                if _is_public(name, node):
                    yield f"#### {name}.{node.name}\n"
                    own = [each for each in overloads if each.name == node.name]
                    yield from _code([_signature(each, home) for each in own or [node]])
                    yield from _docstring(node)


def _tree_of(value: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(tree, ast.ClassDef), value
    return tree


def _fields(tree: ast.ClassDef, value: type) -> Iterator[str]:
    """What an enumeration, a tuple or a dataclass has, one line each, with the comments of the source."""
    lines = textwrap.dedent(inspect.getsource(value)).splitlines()
    for node in tree.body:
        is_member = isinstance(node, ast.Assign) and issubclass(value, Enum)
        if is_member or (isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_")):
            yield lines[node.lineno - 1]


def _is_public(class_name: str, node: Node) -> bool:
    is_internal = node.name.startswith("_") or f"{class_name}.{node.name}" in INTERNAL
    return not is_internal and not _is_decorated(node, "overload")


def _is_decorated(node: Node, name: str) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == name for decorator in node.decorator_list)


def _signature(node: Node, home: dict[str, Any]) -> str:
    returns = f" -> {_unquoted(ast.unparse(node.returns))}" if node.returns is not None else ""
    if _is_decorated(node, "property"):
        return f"{node.name}:{returns.removeprefix(' ->')}"
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({_arguments(node, home)}){returns}"


def _arguments(node: Node, home: dict[str, Any]) -> str:
    """The arguments without `self`, with the values of their defaults: on one line, or each on its own if long."""
    pieces = []
    for piece in _pieces(ast.unparse(node.args)):
        name, equals, default = piece.partition("=")
        name, colon, annotation = name.partition(": ")
        shown = str(home[default]) if default.isupper() and default.isidentifier() else default
        pieces.append(name + colon + _unquoted(annotation) + (f" = {shown}" if colon and equals else equals + shown))
    if pieces and pieces[0] in ("self", "cls"):
        del pieces[0]
    line = ", ".join(pieces)
    return line if len(line) <= 80 else "\n" + "".join(f"    {piece},\n" for piece in pieces)


def _pieces(arguments: str) -> list[str]:
    """Splits at the commas that separate arguments."""
    pieces, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _unquoted(annotation: str) -> str:
    return annotation.replace("'", "") if annotation.startswith("'") else annotation


def _code(lines: list[str]) -> Iterator[str]:
    yield from ("```text", *lines, "```\n")


def _docstring(node: Node | ast.ClassDef) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield f"{text}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
