"""The tour of the source names every module, with its own words."""

from tests.support import tour


def test_the_tour_is_up_to_date() -> None:
    assert tour.PAGE.read_text(encoding="utf-8") == tour.page(), "write it again: python -m tests.support.tour"


def test_every_module_says_in_a_sentence_what_it_does() -> None:
    paths = [path for path in (tour.ROOT / "postdate").rglob("*.py") if path.name != "__init__.py"]
    silent = [str(path.relative_to(tour.ROOT)) for path in paths if len(tour.first_sentence(path).split()) < 3]
    assert not silent
