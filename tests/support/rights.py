"""Writes the table of rights in docs/security.md: what each request needs.

python -m tests.support.rights
"""

from pathlib import Path

from postdate.wire.requests import Request

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
HEADING = "## What each request needs\n"
_NEXT = "\n## "


def table() -> str:
    rows = ["| code | request | needs |", "|---|---|---|"]
    rows += [f"| {int(request)} | `{request.name}` | {request.right} |" for request in sorted(Request)]
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """Returns the page with the table of now."""
    before, heading, after = text.partition(HEADING)
    assert heading, f"{PAGE} has no heading {HEADING!r}"
    intro = after.partition("\n| code |")[0]
    rest = after.find(_NEXT)
    return before + heading + intro + "\n" + table() + (after[rest:] if rest >= 0 else "")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
