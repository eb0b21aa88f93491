"""Extras: a missing one is named, with the way to install it, and none is loaded to find out."""

import subprocess
import sys

import pytest

from postdate.errors import UsageError
from postdate.extras import LIBRARIES, has_extra, require_extra


@pytest.mark.parametrize("extra", sorted(LIBRARIES))
def test_an_installed_extra_is_found_without_loading_it(extra: str) -> None:
    program = (
        f"import sys; from postdate.extras import has_extra; assert has_extra({extra!r});"
        f" assert not {set(LIBRARIES[extra])} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    require_extra(extra, "this test")


@pytest.mark.parametrize("extra", sorted(LIBRARIES))
@pytest.mark.parametrize("library", ["pyarrow", "deltalake", "pyspark"])
def test_a_missing_library_is_a_missing_extra(extra: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert has_extra(extra) == (library not in LIBRARIES[extra])


def test_the_sentence_names_what_needs_it_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    require_extra("table", "postdate bulk")
    with pytest.raises(UsageError) as refused:
        require_extra("spark", "postdate pipeline")
    assert str(refused.value) == (
        "postdate pipeline needs postdate[spark], which is not installed: run pip install '.[spark]' in a clone of"
        " Postdate"
    )
