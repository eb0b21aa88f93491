"""Writes docs/tour.md: every module of the package with the first sentence of its docstring, layer by layer.

python -m tests.support.tour
"""

import ast
import re
from pathlib import Path

from tests.test_imports import LAYERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"
HEAD = """\
# A tour of the source

Every module, from the bottom layer to the top, with the first sentence of its docstring. A module imports only what
stands above it on this page, or in its own part. `python -m tests.support.tour` writes this page again; a test notices
when it is out of date.
"""


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    found = re.match(r".*?[.:](?= [A-Z`]|$)", paragraph)
    return (found[0] if found else paragraph).removesuffix(":").removesuffix(".").replace("|", "\\|")


def modules_of(part: str) -> list[Path]:
    """Returns the files of a part, those of sub-folders after its own."""
    single = ROOT / "postdate" / f"{part}.py"
    if single.exists():
        return [single]
    paths = [path for path in (ROOT / "postdate" / part).rglob("*.py") if path.name != "__init__.py"]
    return sorted(paths, key=lambda path: (len(path.parts), path))


def page() -> str:
    """Returns the page as it should be."""
    lines = [HEAD]
    for parts in LAYERS:
        lines.append(f"## {', '.join(parts)}\n\n| file | what it does |\n|---|---|")
        for part in parts:
            lines += [f"| `{path.relative_to(ROOT)}` | {first_sentence(path)} |" for path in modules_of(part)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
