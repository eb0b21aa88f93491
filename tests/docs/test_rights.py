"""The table of rights in docs/security.md."""

from tests.support import rights


def test_the_table_of_rights_is_that_of_the_code() -> None:
    text = rights.PAGE.read_text(encoding="utf-8")
    assert rights.page(text) == text, "docs/security.md is out of date: run python -m tests.support.rights"
