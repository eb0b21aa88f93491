"""`postdate settings`: values with their sources, and a file to start from."""

import json
from pathlib import Path

import pytest

from postdate import cli
from postdate.cli.settings import toml
from postdate.config import FIELDS, Settings, load

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a file of settings, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in FIELDS:
        monkeypatch.delenv(f"POSTDATE_{name.upper()}", raising=False)
    monkeypatch.delenv("POSTDATE_CONFIG", raising=False)
    return tmp_path


def test_the_file_to_start_from_has_every_setting_and_loads_as_the_defaults(elsewhere: Path) -> None:
    file = elsewhere / "start.toml"
    file.write_text(toml())
    loaded = load(file=file, environ={}, flags={})
    assert (loaded.settings, loaded.warnings) == (Settings(), ())
    assert list(loaded.sources) == list(FIELDS)
    for name, field in FIELDS.items():
        assert f"# {field.metadata['why']}" in toml(), name


def test_the_file_is_printed(capsys: Capsys) -> None:
    assert cli.main(["settings", "--toml"]) == 0
    assert capsys.readouterr().out == toml()


def test_each_setting_is_printed_with_its_source(
    capsys: Capsys, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "postdate.toml").write_text("retention_ms = '7d'\nhost = '0.0.0.0'")
    monkeypatch.setenv("POSTDATE_HOST", "::")
    assert cli.main(["settings", "--segment-bytes", "128MiB"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["setting", "value", "from"]
    assert [row[0] for row in rows[1:]] == list(FIELDS)
    for row in (
        ["retention_ms", "7d", "postdate.toml"],
        ["host", "::", "environment", "POSTDATE_HOST"],
        ["segment_bytes", "128MiB", "--segment-bytes"],
        ["lead_ms", "1m", "default"],
        ["table", '""', "default"],
    ):
        assert row in rows


def test_a_program_gets_values_as_they_are(capsys: Capsys) -> None:
    assert cli.main(["settings", "--lead-ms", "30s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(FIELDS)
    assert found["lead_ms"] == {"value": 30_000, "source": "--lead-ms"}
    assert found["auto_create_topics"] == {"value": True, "source": "default"}


def test_a_name_that_is_fixed_now_is_a_warning(capsys: Capsys, elsewhere: Path) -> None:
    (elsewhere / "postdate.toml").write_text("snapshot_batches = 5")
    assert cli.main(["settings", "--locks-max", "7"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "postdate: warning: snapshot_batches in postdate.toml is fixed at 100,000 now and is ignored",
        "postdate: warning: --locks-max is fixed at 100,000 now and is ignored",
    ]


def test_what_cannot_be_used_is_a_2(capsys: Capsys, elsewhere: Path) -> None:
    (elsewhere / "postdate.toml").write_text("rout_port = 5")
    assert cli.main(["settings"]) == 2
    assert "which is no setting; did you mean route_port?" in capsys.readouterr().err
