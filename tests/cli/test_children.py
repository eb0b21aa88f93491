"""What `postdate up` starts: the commands that the settings ask for, without starting them."""

import os
from pathlib import Path

import pytest

from postdate.cli import children
from postdate.config import GIB, Limits, Settings


def words_after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_bulk_is_told_folder_host_port_broker_and_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = children._bulk(Settings(data="here", host="0.0.0.0", bulk_port=0), {"broker": "0.0.0.0:10911"})
    assert command[1:4] == ["-m", "postdate", "bulk"]
    assert words_after(command, "--data") == str(tmp_path / "here")
    assert (words_after(command, "--host"), words_after(command, "--port")) == ("0.0.0.0", "0")
    assert words_after(command, "--broker") == "127.0.0.1:10911"
    assert words_after(command, "--parent-pid") == str(os.getpid())


def test_bulk_takes_the_port_that_it_had_when_it_comes_again() -> None:
    command = children._bulk(Settings(bulk_port=0), {"broker": "127.0.0.1:1", "bulk": "127.0.0.1:4711"})
    assert words_after(command, "--port") == "4711"


@pytest.mark.parametrize(
    ("table", "told"),
    [("", "{}/data/table"), ("mine", "{}/mine"), ("/else/where", "/else/where"), ("s3://bucket/t", "s3://bucket/t")],
)
def test_the_pipeline_is_told_a_table_that_means_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = children._pipeline(Settings(data="data", table=table), {"broker": "[::]:10911", "bulk": "[::]:9878"})
    assert words_after(command, "--table") == told.format(tmp_path)
    assert words_after(command, "--addr") == "[::1]:10911"
    assert words_after(command, "--master") == "local[*]"
    assert words_after(command, "--memory") == str(GIB)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (Settings(), ["bulk", "pipeline"]),
        (Settings(pipeline="none"), ["bulk", "pipeline"]),
        (Settings(bulk_port=-1), ["bulk", "pipeline"]),
    ],
)
def test_each_part_has_a_sentence_whether_it_is_there_or_not(settings: Settings, names: list[str]) -> None:
    assert sorted(children.plan_children(settings, Limits())) == names


def test_with_users_bulk_has_a_socket_unless_a_port_is_chosen(tmp_path: Path) -> None:
    data, broker = str(tmp_path), {"broker": "127.0.0.1:10911"}
    assert words_after(children._bulk(Settings(data=data), broker), "--port") == "9878"
    (tmp_path / "auth.json").write_text("{}")
    command = children._bulk(Settings(data=data), broker | {"bulk": f"unix:{tmp_path}/bulk.sock"})
    assert words_after(command, "--socket") == f"{tmp_path}/bulk.sock"
    assert "--port" not in command
    for chosen in (Settings(data=data, bulk_port=9_000), Settings(data=data, pipeline="none")):
        assert "--socket" not in children._bulk(chosen, broker)
