"""Permits for bulk: made by the broker or a pipeline, checked by bulk."""

import pytest

from postdate.access.permits import LIFE_MS, READER, Permit, make_permit, read_permit
from postdate.access.token import TOKEN_USER
from postdate.errors import UsageError

TOKEN, NOW_MS = "ab" * 32, 1_700_000_000_000


def test_a_permit_is_good_for_its_topic_and_for_a_day() -> None:
    text = make_permit(TOKEN, READER, NOW_MS, "orders.eu/ä")
    permit = read_permit(TOKEN, text, NOW_MS + LIFE_MS)
    assert permit == Permit(READER, NOW_MS + LIFE_MS, "orders.eu/ä")
    assert (permit.may_write, permit.may_read("orders.eu/ä"), permit.may_read("other"), permit.may_read("")) == (
        False, True, False, False,
    )  # fmt: skip
    with pytest.raises(UsageError, match="not good any more"):
        read_permit(TOKEN, text, NOW_MS + LIFE_MS + 1)


def test_the_pipelines_permit_is_good_for_everything() -> None:
    permit = read_permit(TOKEN, make_permit(TOKEN, TOKEN_USER, NOW_MS), NOW_MS)
    assert permit.may_write
    assert permit.may_read("")
    assert permit.may_read("orders")


def test_a_permit_that_was_changed_or_made_without_the_token_is_refused() -> None:
    text = make_permit(TOKEN, READER, NOW_MS, "orders")
    holder, expires, topic, signature = text.split(".")
    forged = [
        "", "...", "x", text[:-1], f"{text}.", "ä.ä", f"{TOKEN_USER}.{expires}.{topic}.{signature}",
        f"{holder}.{expires}0.{topic}.{signature}",
        f"{holder}.{expires}..{signature}", make_permit("cd" * 32, TOKEN_USER, NOW_MS),
    ]  # fmt: skip
    for each in forged:
        with pytest.raises(UsageError, match="not one of this broker's"):
            read_permit(TOKEN, each, NOW_MS)


def test_neither_token_nor_key_stands_in_a_permit() -> None:
    assert TOKEN not in make_permit(TOKEN, TOKEN_USER, NOW_MS)
    assert make_permit("", READER, NOW_MS) == "", "nobody could check it"
