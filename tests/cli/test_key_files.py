"""`--keys FILE` of cancel and postpone: files of every kind, what became of each key, and going on after an end."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postdate import Outgoing, cli, connect
from postdate.cli import key_files
from tests.support.server import Served, serving

Capsys = pytest.CaptureFixture[str]
COLUMNS = "key,outcome,id,due,reason"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(tmp_path / "data") as served:
        monkeypatch.setenv("POSTDATE_ADDR", served.address)
        yield served


def send(*keys: str, delay: str | None = "2h") -> None:
    with connect() as client:
        for key in keys:
            client.send("orders", key.encode(), key=key, delay=delay)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def run(capsys: Capsys, *words: object, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == code
    return capsys.readouterr().out.strip()


def run_json(capsys: Capsys, *words: object, code: int = 0) -> Any:
    return json.loads(run(capsys, *words, "--json", code=code))


def outcomes(path: Path) -> dict[str, str]:
    with path.open(newline="") as file:
        return {row["key"]: row["outcome"] for row in csv.DictReader(file)}


def files(folder: Path, keys: list[str]) -> list[tuple[Path, list[str]]]:
    """The same keys in files of every kind, each with the flags that it needs."""
    table = pa.table({"order": keys, "total": list(range(len(keys)))})
    pq.write_table(table, folder / "wide.parquet")
    pq.write_table(table.select(["order"]), folder / "narrow.parquet")
    rows = "".join(f'"{key}",{number}\r\n' for number, key in enumerate(keys))
    return [
        (written(folder / "keys.txt", "\n".join(keys)), []),
        (written(folder / "keys", "\n\n".join(keys) + "\n"), []),
        (written(folder / "wide.csv", f"\ufefforder,total\r\n{rows}"), ["--column", "order"]),
        (written(folder / "narrow.csv", "\n".join(["order", *(f'"{key}"' for key in keys)])), []),
        (folder / "wide.parquet", ["--column", "order"]),
        (folder / "narrow.parquet", []),
    ]


@pytest.mark.usefixtures("served")
def test_keys_of_every_kind_of_file_are_cancelled(capsys: Capsys, tmp_path: Path) -> None:
    for number, (path, flags) in enumerate(files(tmp_path, ["a", "order-2", "c,d"])):
        send("a", "order-2", "c,d", f"other-{number}")
        summary = run_json(capsys, "cancel", "--topic", "orders", "--keys", path, *flags, code=0)
        cancelled = summary["cancelled"] - 3 * number  # what was cancelled before is still known
        assert (summary["keys"], cancelled, summary["unknown"], summary["failed"]) == (3, 3, 0, 0), path.name
    with connect() as client:
        states = [client.find("orders", f"other-{number}")[0].state for number in range(6)]
    assert states == ["waiting"] * 6


@pytest.mark.usefixtures("served")
def test_each_key_is_answered_truthfully(capsys: Capsys, tmp_path: Path) -> None:
    send("waits", "waits-too")
    send("is-out", delay=None)
    keys = written(tmp_path / "keys.txt", "waits\nis-out\nnobody\nwaits\nwaits-too\ntwo words")
    output = tmp_path / "answers.csv"
    printed = run(capsys, "cancel", "--topic", "orders", "--keys", keys, "--output", output)
    assert printed == "5 keys: 2 cancelled, 1 delivered, 1 unknown, 1 failed"
    assert outcomes(output) == {
        "waits": "cancelled", "waits-too": "cancelled", "is-out": "delivered", "nobody": "unknown",
        "two words": "failed",
    }  # fmt: skip
    with output.open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    with connect() as client:
        (found,) = client.find("orders", "waits")
    assert (rows["waits"]["id"], int(rows["waits"]["due"])) == (found.id, found.due_at_ms)
    assert rows["two words"]["reason"].startswith("the key 'two words' has a space")


@pytest.mark.usefixtures("served")
def test_a_dry_run_counts_and_changes_nothing(capsys: Capsys, tmp_path: Path) -> None:
    send(*(f"k{number}" for number in range(12)))
    send("out", delay=None)
    keys = written(tmp_path / "keys.txt", "\n".join(["nobody", "out", *(f"k{number}" for number in range(12))]))
    lines = run(capsys, "cancel", "--topic", "orders", "--keys", keys, "--dry-run").splitlines()
    assert lines[0] == "12 messages of 14 keys would be cancelled, 1 unknown"
    assert lines[2].split() == ["due", "id", "tag", "key", "body"]
    assert len(lines) == 3 + 10
    told = run_json(capsys, "cancel", "--topic", "orders", "--keys", keys, "--dry-run")
    assert (told["keys"], told["waiting"], told["unknown"], len(told["sample"])) == (14, 12, 1, 10)
    with connect() as client:
        assert client.find("orders", "k3")[0].state == "waiting"


@pytest.mark.usefixtures("served")
def test_a_postponement_that_goes_on_moves_nothing_twice(capsys: Capsys, tmp_path: Path) -> None:
    send("a", "b", "c")
    with connect() as client:
        due = {key: client.find("orders", key)[0].due_at_ms or 0 for key in "abc"}
    output, words = tmp_path / "answers.csv", ("postpone", "--topic", "orders", "--by", "1h", "--keys")
    first = written(tmp_path / "first.txt", "a\nb")
    assert run(capsys, *words, first, "--output", output) == "2 keys: 2 moved, 0 delivered, 0 unknown"
    everything = written(tmp_path / "all.txt", "a\nb\nc\na")
    assert run(capsys, *words, everything, "--output", output) == "1 key: 1 moved, 0 delivered, 0 unknown"
    assert run(capsys, *words, everything, "--output", output, code=1).startswith("0 keys: 0 moved")
    assert output.read_text().splitlines()[0] == COLUMNS
    assert outcomes(output) == dict.fromkeys("abc", "moved")
    with connect() as client:
        assert {key: client.find("orders", key)[0].due_at_ms for key in "abc"} == {
            key: at + 3_600_000 for key, at in due.items()
        }


@pytest.mark.usefixtures("served")
def test_keys_from_stdin(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send("a", "b")
    with written(tmp_path / "keys", "a\nb\n").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert (
            run(capsys, "cancel", "--topic", "orders", "--keys", "-") == "2 keys: 2 cancelled, 0 delivered, 0 unknown"
        )


@pytest.mark.usefixtures("served")
def test_more_keys_than_are_asked_for_at_a_time(capsys: Capsys, tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(3 * key_files.IN_FLIGHT + 1)]
    with connect() as client:
        client.send_batch("orders", [Outgoing(key.encode(), delay="2h", key=key) for key in keys])
    path = written(tmp_path / "keys.txt", "\n".join(keys))
    assert run_json(capsys, "cancel", "--topic", "orders", "--keys", path)["cancelled"] == len(keys)


def test_a_broker_that_goes_away_ends_it_with_what_is_known(tmp_path: Path, capsys: Capsys) -> None:
    with serving(tmp_path / "data") as served:
        address = served.address
    keys = written(tmp_path / "keys.txt", "a\nb\n")
    words = ("cancel", "--topic", "orders", "--keys", str(keys), "--addr", address, "--timeout", "1s")
    assert cli.main(list(words)) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("0 keys: 0 cancelled")
    assert "no broker" in printed.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--keys {keys}", "--keys goes with --topic"),
        ("--keys {keys} --topic t --key k", "--keys goes with --topic"),
        ("handle --keys {keys} --topic t", "--keys goes with --topic"),
        ("--keys {keys} --topic t --where true", "--keys goes with --topic"),
        ("--keys {keys} --topic t --id x", "--id and --no-wait are for --where"),
        ("--keys {keys} --topic t --dry-run --output x", "--dry-run changes nothing"),
        ("--keys {keys} --topic t --due 1798790400000", "--due names one message"),
        ("--keys {keys} --topic t --column c", "--column is for .csv and .parquet"),
        ("--topic t --key k --output x", "--column and --output are for --keys"),
        ("--keys {csv} --topic t", "name one with --column; it has order, total"),
        ("--keys {csv} --topic t --column c", "there is no column c; it has order, total"),
        ("--keys {parquet} --topic t --column order", "is not a Parquet file"),
        ("--keys {keys} --topic t --output {csv}", "is no output of this command"),
        ("--keys {bytes} --topic t", "cannot be read: 'utf-8' codec"),
    ],
)
@pytest.mark.usefixtures("served")
def test_what_makes_no_sense_is_refused(capsys: Capsys, tmp_path: Path, words: str, sentence: str) -> None:
    places = {
        "keys": written(tmp_path / "keys.txt", "a"), "csv": written(tmp_path / "a.csv", "order,total\n1,2\n"),
        "parquet": written(tmp_path / "a.parquet", "no Parquet"), "bytes": tmp_path / "bytes",
    }  # fmt: skip
    places["bytes"].write_bytes(b"\xff\xfe\n")
    assert cli.main(["cancel", *words.format(**places).split()]) == 2
    assert sentence in capsys.readouterr().err
