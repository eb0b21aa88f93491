"""Settings: defaults that hold together, bounds that refuse with a sentence, and where values come from."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from postdate.config import (
    DAY_MS,
    FIELDS,
    GIB,
    GROUPS,
    HOUR_MS,
    KIB,
    LIMITS,
    LIVE,
    MIB,
    MINUTE_MS,
    ROCKETMQ_NAMES,
    Limits,
    Settings,
    apply_changes,
    find_file,
    load,
    rocketmq_settings,
)
from postdate.errors import UsageError
from postdate.message import DEFAULT_LEVELS_TEXT, DELAY_MS_MAX_DEFAULT
from postdate.storage.folder import FIXED_SETTINGS

BOUNDED = [field for field in dataclasses.fields(Settings) if field.metadata["low"] is not None]


def test_the_defaults_are_valid_and_equal_those_of_a_message() -> None:
    settings = Settings()
    assert settings.message_delay_level == DEFAULT_LEVELS_TEXT
    assert settings.delay_ms_max == DELAY_MS_MAX_DEFAULT


def test_every_setting_and_every_limit_says_why_it_has_its_value() -> None:
    fields = (*dataclasses.fields(Settings), *dataclasses.fields(Limits))
    assert [field.name for field in fields if not field.metadata["why"]] == []


def test_every_setting_is_in_one_group_in_the_order_of_its_fields() -> None:
    assert [name for names in GROUPS.values() for name in names] == list(FIELDS)


@pytest.mark.parametrize("name", list(LIMITS))
def test_a_limit_that_cannot_work_is_refused_with_its_name(name: str) -> None:
    low = LIMITS[name].metadata["low"]
    with pytest.raises(UsageError, match=f"{name} is {low - 1}, expected (at least )?{low}"):
        Limits(**{name: low - 1})


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


def test_a_pipeline_is_embedded_or_none() -> None:
    with pytest.raises(UsageError, match="pipeline is 'maybe', expected one of embedded, none"):
        Settings(pipeline="maybe")


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[4]",
        "local[*]",
        "local[4,2]",
        "spark://a:7077",
        "spark://a:7077,b:7077",
        "yarn",
        "k8s://https://a:1",
    ],
)
def test_a_master_that_spark_knows_is_taken(master: str) -> None:
    assert Settings(spark_master=master).spark_master == master


@pytest.mark.parametrize(
    "master", ["", "locally", "local[]", "local[a]", "spark://a", "sparc://a:7077", "spark://a:7077,"]
)
def test_a_master_that_spark_does_not_know_is_refused(master: str) -> None:
    with pytest.raises(UsageError, match=r"spark_master is .*, expected local, "):
        Settings(spark_master=master)


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


@pytest.mark.parametrize("name", ["data", "host", "broker_name", "cluster_name"])
def test_a_name_is_not_empty(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '', expected "):
        Settings(**{name: ""})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["broker_name", "cluster_name"])
def test_a_name_has_no_space_because_a_handle_has(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'my broker', expected one or more of the characters"):
        Settings(**{name: "my broker"})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, "true", None])
def test_only_true_and_false_are_switches(value: object) -> None:
    with pytest.raises(UsageError, match=r"auto_create_topics is .*, expected true or false"):
        Settings(auto_create_topics=value)  # type: ignore[arg-type]


def test_a_text_is_a_text() -> None:
    with pytest.raises(UsageError, match="host is 127, expected a text"):
        Settings(host=127)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "broker", "broker.example.org:10911", "10.0.0.7", "10.0.0.7:1", "[::1]:65535"])
def test_an_address_for_clients_is_taken(text: str) -> None:
    assert Settings(advertise=text).advertise == text


@pytest.mark.parametrize(
    "text", ["::1", "[::1", "[no]:1", "host:0", "host:65536", "host:", ":1", "a b", "host:1:2", "http://host", " "]
)
def test_an_address_that_no_client_could_reach_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=f"advertise is {text!r}".replace("[", r"\[") + ", expected host, host:port or"
    ):
        Settings(advertise=text)


# -- where values come from -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a file of settings, in the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    return Path("postdate.toml")


def loaded(
    file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Settings:
    return load(file=file, environ=environ or {}, flags=flags or {}).settings


def test_without_any_source_the_defaults_count() -> None:
    assert loaded() == Settings()


def test_a_flag_beats_the_environment_and_that_the_file(file: Path) -> None:
    file.write_text("lead_ms = 1000\nhost = 'a'\nflush = 'async'\nroute_port = 1")
    environ = {"POSTDATE_LEAD_MS": "2000", "POSTDATE_HOST": "b"}
    assert loaded(file, environ, {"lead_ms": "3000"}) == Settings(lead_ms=3_000, host="b", flush="async", route_port=1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("route_port", "0", 0),
        ("vip_port", "-1", -1),
        ("wheel_entries_max", "1_000_000", 1_000_000),
        ("segment_bytes", "1GiB", GIB),
        ("segment_bytes", "64 MiB", 64 * MIB),
        ("frame_bytes_max", "16KiB", 16 * KIB),
        ("frame_bytes_max", "2048", 2_048),
        ("spark_memory_bytes", "1TiB", 1024 * GIB),
        ("lead_ms", "500ms", 500),
        ("lead_ms", "30s", 30_000),
        ("lead_ms", "10m", 10 * MINUTE_MS),
        ("lead_ms", "10 min", 10 * MINUTE_MS),
        ("retention_ms", "72h", 72 * HOUR_MS),
        ("retention_ms", "7d", 7 * DAY_MS),
        ("retention_ms", "1h30m", 90 * MINUTE_MS),
        ("retention_ms", "1.5h", 90 * MINUTE_MS),
        ("retention_ms", " 5 ", 5),
        ("flush", "async", "async"),
        ("message_delay_level", "1s 5s", "1s 5s"),
        *[("auto_create_groups", text, True) for text in ("true", "1", "yes", "on", "True")],
        *[("auto_create_groups", text, False) for text in ("false", "0", "no", "off", "OFF")],
    ],
)
def test_a_text_becomes_a_value_wherever_it_stands(file: Path, name: str, text: str, value: object) -> None:
    file.write_text(f'{name} = "{text}"')
    assert getattr(loaded(file), name) == value
    assert getattr(loaded(environ={f"POSTDATE_{name.upper()}": text}), name) == value
    assert getattr(loaded(flags={name: text}), name) == value


def test_a_file_may_hold_values_instead_of_texts(file: Path) -> None:
    file.write_text("segment_bytes = 1_048_576\nbatch_bytes_max = 65536\nauto_create_topics = false")
    assert loaded(file) == Settings(segment_bytes=MIB, batch_bytes_max=64 * KIB, auto_create_topics=False)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("route_port", "70000", "is 70000, expected 0 to 65535"),
        ("route_port", "80s", "is '80s', expected a whole number"),
        ("lead_ms", "5MiB", "is '5MiB', expected a whole number of milliseconds or a span such as 500ms, 30s"),
        ("lead_ms", "2h", "is 7200000, expected 100 to 3600000"),
        ("segment_bytes", "64MB", "is '64MB', expected a whole number of bytes or a size such as 16KiB, 64MiB"),
        ("segment_bytes", "20KiB", "is 20480, expected a power of two"),
        ("wheel_entries_max", "1e6", "is '1e6', expected a whole number"),
        ("wheel_entries_max", "9" * 5_000, "expected a whole number"),
        ("auto_create_topics", "maybe", "is 'maybe', expected true or false"),
        ("flush", "never", "is 'never', expected one of sync, async"),
    ],
)
def test_an_error_names_its_source(file: Path, name: str, text: str, sentence: str) -> None:
    file.write_text(f'{name} = "{text}"')
    flag, variable = "--" + name.replace("_", "-"), f"POSTDATE_{name.upper()}"
    with pytest.raises(UsageError, match=f"^{name} in postdate.toml .*{re.escape(sentence)}"):
        loaded(file)
    with pytest.raises(UsageError, match=f"^environment {variable} .*{re.escape(sentence)}"):
        loaded(environ={variable: text})
    with pytest.raises(UsageError, match=f"^{flag} .*{re.escape(sentence)}"):
        loaded(flags={name: text})


@pytest.mark.parametrize("value", ["1.5", "1979-05-27", "[1]", "true"])
def test_a_value_of_another_type_in_a_file_is_refused(file: Path, value: str) -> None:
    file.write_text(f"route_port = {value}")
    with pytest.raises(UsageError, match=r"route_port in postdate.toml is .*, expected a whole number"):
        loaded(file)


def test_an_unknown_name_in_a_file_is_refused_and_the_nearest_named(file: Path) -> None:
    file.write_text("rout_port = 1")
    with pytest.raises(UsageError, match=r"postdate.toml has 'rout_port', which is no setting; did you mean route"):
        loaded(file)
    file.write_text("[xyzzy]\nroute_port = 1")
    with pytest.raises(UsageError, match=r"postdate.toml has 'xyzzy', which is no setting$"):
        loaded(file)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("snapshot_batches", "100,000"), ("fire_pause_ms_max", "5s"), ("json_bytes_max", "512KiB"), ("turn_ms_max", "10")],
)
def test_a_name_that_is_a_fixed_limit_now_is_ignored_with_a_warning(file: Path, name: str, fixed: str) -> None:
    file.write_text(f"{name} = 'whatever'")
    variable, flag = f"POSTDATE_{name.upper()}", "--" + name.replace("_", "-")
    for label, loaded in (
        (f"{name} in postdate.toml", load(file=file, environ={}, flags={})),
        (f"environment {variable}", load(file=None, environ={variable: "7"}, flags={})),
        (flag, load(file=None, environ={}, flags={name: "7"})),
    ):
        assert loaded.warnings == (f"{label} is fixed at {fixed} now and is ignored",)
        assert (loaded.settings, loaded.sources) == (Settings(), {})


def test_the_source_of_each_setting_is_known(file: Path) -> None:
    file.write_text("lead_ms = 1000\nhost = 'a'\nroute_port = 1")
    found = load(file=file, environ={"POSTDATE_LEAD_MS": "2000", "POSTDATE_HOST": "b"}, flags={"lead_ms": "3000"})
    assert found.sources == {
        "lead_ms": "--lead-ms", "host": "environment POSTDATE_HOST", "route_port": "postdate.toml",
    }  # fmt: skip
    assert found.warnings == ()


def test_unknown_and_empty_variables_are_left_alone() -> None:
    environ = {
        "POSTDATE_PORT": "tcp://10.0.0.1:9876",
        "POSTDATE_ADDR": "x",
        "POSTDATE_CONFIG": "y",
        "POSTDATE_HOST": "",
    }
    assert loaded(environ=environ) == Settings()


@pytest.mark.parametrize("content", [b"route_port = ", b"\xff"])
def test_a_file_that_is_not_toml_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"the settings file postdate.toml is not TOML: "):
        loaded(file)


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match=r"the settings file postdate.toml cannot be read: No such file"):
        loaded(file)


def test_the_file_is_that_of_the_flag_or_the_environment_or_the_one_that_is_there(file: Path) -> None:
    assert find_file(None, {}) is None
    file.write_text("")
    assert find_file(None, {}) == file
    assert find_file(None, {"POSTDATE_CONFIG": "b.toml"}) == Path("b.toml")
    assert find_file("a.toml", {"POSTDATE_CONFIG": "b.toml"}) == Path("a.toml")


# ---------------------------------------------------------------------------------------- while the broker runs


def test_what_may_change_is_a_setting_and_not_fixed_with_the_folder() -> None:
    assert FIELDS.keys() >= LIVE
    assert not FIELDS.keys() & LIMITS.keys()
    assert not LIVE & set(FIXED_SETTINGS)
    assert FIELDS.keys() >= set(ROCKETMQ_NAMES.values())
    assert not FIELDS.keys() & ROCKETMQ_NAMES.keys()


def test_settings_change_by_the_names_and_in_the_units_of_rocketmq() -> None:
    texts = {"fileReservedTime": " 48 ", "timerMaxDelaySec": "90", "maxMessageSize": "1024"}
    changed = apply_changes(Settings(), texts)
    assert changed == Settings(retention_ms=48 * HOUR_MS, delay_ms_max=90_000, body_bytes_max=1_024)
    shown = rocketmq_settings(vars(changed))
    assert shown.keys() == ROCKETMQ_NAMES.keys()
    assert {name: str(shown[name]) for name in texts} == {name: text.strip() for name, text in texts.items()}
    assert (shown["flushDiskType"], shown["serverChannelMaxIdleTimeSeconds"]) == ("SYNC_FLUSH", 120)
    assert rocketmq_settings(vars(Settings(flush="async")))["flushDiskType"] == "ASYNC_FLUSH"
    assert rocketmq_settings(vars(Settings(retention_ms=2 * HOUR_MS - 1)))["fileReservedTime"] == 1, "whole hours"


def test_settings_change_by_text_and_the_old_value_stays_as_it_is() -> None:
    before = Settings(lead_ms=2_000)
    texts = {"retention_ms": "7d", "autoCreateTopicEnable": "false", "body_bytes_max": " 1MiB "}
    after = apply_changes(before, texts)
    assert after == Settings(lead_ms=2_000, retention_ms=7 * DAY_MS, auto_create_topics=False, body_bytes_max=MIB)
    assert before == Settings(lead_ms=2_000)


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"lead_ms": "1s"}, "lead_ms cannot change while the broker runs"),
        ({"messageDelayLevel": "1s"}, "messageDelayLevel (message_delay_level) cannot change while the broker runs"),
        ({"retention": "7d"}, "'retention' is no setting; did you mean retention_ms?"),
        ({"fileReservedTime": "7d"}, "fileReservedTime (retention_ms) is '7d', expected a whole number of hours"),
        ({"fileReservedTime": "-1"}, "fileReservedTime (retention_ms) is -3600000, expected 0 to 3155760000000"),
        ({"timerMaxDelaySec": ""}, "timerMaxDelaySec (delay_ms_max) is '', expected a whole number of seconds"),
        ({"mappedFileSizeCommitLog": "1"}, "mappedFileSizeCommitLog (segment_bytes) cannot change while the broker"),
        ({"brokerRole": "SLAVE"}, "'brokerRole' is no setting"),
        ({"fire_pause_ms_max": "1s"}, "fire_pause_ms_max is fixed at 5s and cannot change"),
        ({"topics_max": "0"}, "topics_max is 0, expected 1 to 1000000"),
        ({"topics_max": "5", "retention_ms": "soon"}, "retention_ms is 'soon', expected a whole number of milli"),
        ({"autoCreateTopicEnable": "perhaps"}, "autoCreateTopicEnable (auto_create_topics) is 'perhaps', expected"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(texts: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(sentence)}"):
        apply_changes(Settings(), texts)
