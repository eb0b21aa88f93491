"""Settings: defaults that hold together, bounds that refuse with a sentence."""

import dataclasses
from typing import Any

import pytest

from postdate.config import Settings
from postdate.errors import UsageError
from postdate.message import DEFAULT_LEVELS_TEXT, DELAY_MS_MAX_DEFAULT

BOUNDED = [field for field in dataclasses.fields(Settings) if field.metadata["low"] is not None]


def test_the_defaults_are_valid_and_equal_those_of_a_message() -> None:
    settings = Settings()
    assert settings.message_delay_level == DEFAULT_LEVELS_TEXT
    assert settings.delay_ms_max == DELAY_MS_MAX_DEFAULT


def test_every_setting_says_why_it_has_its_default() -> None:
    assert [field.name for field in dataclasses.fields(Settings) if not field.metadata["why"]] == []


@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: field.name)
def test_a_value_outside_its_bounds_is_refused_with_its_name(field: "dataclasses.Field[Any]") -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    for value in (low - 1, high + 1):
        with pytest.raises(UsageError, match=f"{field.name} is {value}, expected {low} to {high}"):
            Settings(**{field.name: value})


@pytest.mark.parametrize("value", ["8", 8.0, True, None])
def test_only_whole_numbers_are_numbers(value: object) -> None:
    with pytest.raises(UsageError, match=r"lead_ms is .*, expected a whole number"):
        Settings(lead_ms=value)  # type: ignore[arg-type]


def test_an_unknown_flush_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="flush is 'never', expected one of sync, async"):
        Settings(flush="never")


def test_a_segment_is_a_power_of_two() -> None:
    with pytest.raises(UsageError, match="segment_bytes is 65544, expected a power of two"):
        Settings(segment_bytes=(1 << 16) + 8, batch_bytes_max=4_096)


def test_a_batch_fits_into_a_segment() -> None:
    with pytest.raises(UsageError, match=r"batch_bytes_max is 65544, more than segment_bytes \(65536\)"):
        Settings(segment_bytes=1 << 16, batch_bytes_max=(1 << 16) + 8)
    Settings(segment_bytes=1 << 16, batch_bytes_max=1 << 16)


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().lead_ms = 1  # type: ignore[misc]
