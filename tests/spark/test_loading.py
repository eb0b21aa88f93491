"""What the tasks of an import answer, and what is made of an answer that no task of ours gives."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from postdate.errors import PipelineFailed
from postdate.spark.imports.loading import Bad, Loaded, dump_loaded, read_loaded
from postdate.table.format import File

LOADED = Loaded(
    [File("_import-a-soon-1.parquet", 10, 2, 1, 2, 2**61, 2**61 + 1)], 1, [Bad("a.csv", 0, 7, 'due is "é\n"')],
    [("a.csv", 0, 9), ("b.csv", 1 << 40, 3)],
)  # fmt: skip


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_an_answer_is_read_as_it_was_written() -> None:
    assert read_loaded(dump_loaded(LOADED)) == LOADED
    assert read_loaded(dump_loaded(Loaded([], 0, [], []))) == Loaded([], 0, [], [])


def hostile_answers() -> list[str]:
    plain: list[Any] = json.loads(dump_loaded(LOADED))
    changed: list[list[Any]] = [
        [["../../etc/passwd"]], [[["a", 1, 2, 3, 4, 5, "6"]]], [[[["a"], 1, 2, 3, 4, 5, 6]]], [[["a", 1, 2, 3, 4, 5]]],
        [[["a", True, 2, 3, 4, 5, 6]]], [[["a", 1.5, 2, 3, 4, 5, 6]]], [None], [{}], [plain[0], "x"],
        [plain[0], 1, [["a", 0, 0, None]]], [plain[0], 1, [], [["a"]]], [plain[0], 1, [], [["a", "b", 1]]],
    ]  # fmt: skip
    wrong = [json.dumps(change + plain[len(change) :]) for change in changed]
    return ["", "null", "{}", "[]", "[1, 2, 3, 4, 5]", "\x80\x04.", "[" * 100_000, "NaN", *wrong]


@pytest.mark.parametrize("text", hostile_answers(), ids=lambda text: text[:24])
def test_a_hostile_answer_is_refused(text: str) -> None:
    with pytest.raises(PipelineFailed, match="a task of the import has answered what no task of ours does"):
        read_loaded(text)


def test_bytes_that_would_run_something_are_only_read(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    with pytest.raises(PipelineFailed):
        read_loaded(bomb.decode("latin-1"))
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists(), "the bomb is one"
