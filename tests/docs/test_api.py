"""The API reference names everything public, with the source's own words."""

import inspect

import pytest

import postdate
import postdate.client
import postdate.testing
from tests.support import api

MODULES = (postdate, postdate.testing)


def test_the_reference_is_up_to_date() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "write it again: python -m tests.support.api"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_explained(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    silent = [name for name in names if not (getattr(module, name).__doc__ or "").strip()]
    assert not silent


@pytest.mark.parametrize("kind", [postdate.Client, postdate.AsyncClient])
def test_every_method_of_a_client_is_explained(kind: type) -> None:
    methods = inspect.getmembers(kind, inspect.isfunction)
    silent = {f"{kind.__name__}.{name}" for name, method in methods if not name.startswith("_") and not method.__doc__}
    assert silent <= api.INTERNAL


@pytest.mark.parametrize("module", [postdate, postdate.client])
def test_dir_lists_the_names_that_are_loaded_on_first_use(module: object) -> None:
    assert set(module.__all__) <= set(dir(module))  # type: ignore[attr-defined]
