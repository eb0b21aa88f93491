"""Messages of a key in the table: found with an index and without, and taken away by cancels, drops and moves."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from postdate.arrival import own_arrival
from postdate.contract import TableFile
from postdate.keys import key_hash
from postdate.storage import record as records
from postdate.table.delta import Table
from postdate.table.files import remove_file, write_file
from postdate.table.find import KeyQuestion, TableReader, UnfollowedJob
from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE, SCHEMA
from postdate.table.keys import name_index, upper
from postdate.table.living import Removals, drops_of, names_key
from tests.support.core import TOPIC
from tests.support.table_rows import Row, append, cancel_record, keyed_row, row, signed, table_of


def question(key: str, by: str = "any", limit: int = 1_000, topic: str = TOPIC) -> KeyQuestion:
    return KeyQuestion(topic, key, by, (1,), limit)


def found(folder: Path, asked: KeyQuestion, jobs: tuple[UnfollowedJob, ...] = ()) -> list[int]:
    answer = TableReader().find_key(str(folder), asked, jobs=jobs)
    return [each.arrival for each in answer.messages if not each.is_cancelled]


def cancel(due: int, arrival: int, key: str, by: str, topic: str = TOPIC) -> Row:
    hashed = signed(key_hash(key))
    hashes = {"unique_hash": hashed if by == "unique" else 0, "key_hash": hashed if by == "key" else 0}
    return row(due, arrival, kind=CANCEL, key=key, topic=topic, record=cancel_record(key, by, due, topic), **hashes)


def add(folder: Path, number: int, rows: list[Row], *, indexed: bool = True) -> None:
    table = Table(str(folder / "messages"))
    written = write_file(table.folder, f"soon-{number}.parquet", table_of(*rows))
    if not indexed:
        table.folder.remove(name_index(written.file.path))
    table.commit([written])


@pytest.mark.parametrize("indexed", ["all", "none", "some"])
def test_a_search_finds_what_the_rule_lets_wait(tmp_path: Path, indexed: str) -> None:
    dice = random.Random(indexed)
    names = [f"K{n}" for n in range(12)]
    rows: list[Row] = []
    for arrival in range(1, 400):
        due, key, by = 1_000 + dice.randint(0, 3), dice.choice(names), dice.choice(["unique", "key"])
        kind = dice.choice([MESSAGE] * 12 + [CANCEL, DROP, MOVE, MOVE])
        if kind == MESSAGE:
            keys = dice.choice(["", key, f"other {key}", f"{key} {dice.choice(names)}"])
            rows.append(keyed_row(due, arrival, unique=dice.choice(["", *names]), keys=keys))
        elif kind == CANCEL:
            rows.append(cancel(due, arrival, key, by))
        else:
            target = dice.choice([each["arrival"] for each in rows if each["kind"] == MESSAGE] or [1])
            place = {"arrival": target} if kind == DROP else {"arrival": arrival, "unique_hash": target}
            rows.append(row(due, kind=kind, **place))
    dice.shuffle(rows)
    for number in range(5):
        add(tmp_path, number, rows[number::5], indexed=indexed == "all" or (indexed == "some" and number % 2 == 0))
    whole = pa.Table.from_pylist(rows, SCHEMA)
    messages, cancels = (whole.filter(pc.equal(whole["kind"], kind)) for kind in (MESSAGE, CANCEL))

    def has_key(message: int, by: int) -> bool:
        return names_key(cancels["record"][by].as_py(), messages["record"][message].as_py())

    living = messages.filter(Removals.of(whole).living(messages, has_key)).to_pylist()
    undropped = messages.filter(Removals(drops=drops_of(whole)).living(messages)).to_pylist()
    assert 0 < len(living) < len(undropped) < messages.num_rows
    reader = TableReader()
    for by in ("any", "unique", "key"):
        for key in ("K0", "K1", "other", "none"):
            wanted = [each for each in undropped if records.has_key(records.properties_of(each["record"]), key, by)]
            expected = sorted((each["due"], each["arrival"], each not in living) for each in wanted)
            answer = reader.find_key(str(tmp_path), question(key, by))
            assert [(each.due, each.arrival, each.is_cancelled) for each in answer.messages] == expected, (key, by)
            assert not answer.is_cut


def test_what_was_found_has_its_place_and_record(tmp_path: Path) -> None:
    wanted = keyed_row(1_000, 7, unique="U", keys="K other")
    add(tmp_path, 1, [wanted, keyed_row(1_000, 8, unique="U2")])
    (message,) = TableReader().find_key(str(tmp_path), question("other")).messages
    assert message == (1_000, 7, 1, wanted["record"], False)


def test_topic_and_queue_and_key_are_compared(tmp_path: Path) -> None:
    """Equal hashes are only a hint."""
    alike = {"unique_hash": signed(key_hash("U"))}
    rows = [
        keyed_row(1_000, 1, unique="U"), keyed_row(1_000, 2, unique="V") | alike,
        keyed_row(1_000, 3, unique="U") | {"queue": 9}, keyed_row(1_000, 4, unique="U", topic="others"),
    ]  # fmt: skip
    add(tmp_path, 1, rows)
    assert found(tmp_path, question("U")) == [1]
    assert found(tmp_path, question("U", topic="others")) == [4]
    assert found(tmp_path, question("U", "key")) == []


def test_a_search_stops_where_it_has_enough(tmp_path: Path) -> None:
    for number in range(3):
        add(tmp_path, number, [keyed_row(1_000 * number + n, 100 * number + n, keys="K") for n in range(10)])
    answer = TableReader().find_key(str(tmp_path), question("K", limit=12))
    assert [each.arrival for each in answer.messages] == [*range(10), 100, 101]
    assert answer.is_cut
    answer = TableReader().find_key(str(tmp_path), question("K", limit=30))
    assert (len(answer.messages), answer.is_cut) == (30, False)


def test_a_search_reads_the_row_groups_of_hits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, 1, [keyed_row(n, n, unique=f"U{n}") for n in range(20_000)])
    read: list[int] = []

    class Counted(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
        def read_row_group(self, group: int, columns: list[str]) -> Any:
            read.append(group)
            return super().read_row_group(group, columns)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    reader = TableReader()
    assert [each.arrival for each in reader.find_key(str(tmp_path), question("U9000")).messages] == [9_000]
    assert set(read) == {1}
    read.clear()
    assert reader.find_key(str(tmp_path), question("nobody")).messages == []
    assert not read


def test_an_index_of_another_file_is_not_believed(tmp_path: Path) -> None:
    add(tmp_path, 1, [keyed_row(n, n, unique=f"U{n}") for n in range(3)])
    add(tmp_path, 2, [keyed_row(n, n, unique=f"V{n}") for n in range(9)])
    folder = tmp_path / "messages"
    (folder / "_keys-soon-1").write_bytes((folder / "_keys-soon-2").read_bytes())
    assert found(tmp_path, question("V8")) == [8], "it names a row that the other file lacks, which is read instead"


def test_what_jobs_have_brought_and_taken_counts(tmp_path: Path) -> None:
    add(tmp_path, 1, [keyed_row(1_000, 1, unique="U"), keyed_row(1_000, 2, unique="U")])
    table = Table(str(tmp_path / "messages"))
    own = own_arrival(3)
    rows = [keyed_row(2_000 + n, own + n, unique="U") for n in range(3)]
    file = write_file(table.folder, "_job-00000003-soon-a.parquet", table_of(*rows)).file
    drops = pa.table({"due": [1_000, 2_002], "arrival": [1, own + 2]})
    job = UnfollowedJob(5, (TableFile(*file),), 2_000, drops)
    assert found(tmp_path, question("U"), (job,)) == [2, own, own + 1], "the last came too late"
    assert found(tmp_path, question("U")) == [1, 2]


def test_a_file_that_leaves_the_table_is_closed(tmp_path: Path) -> None:
    add(tmp_path, 1, [keyed_row(1_000, 1, unique="U")])
    add(tmp_path, 2, [keyed_row(1_000, 2, unique="U")])
    reader, table = TableReader(), Table(str(tmp_path / "messages"))
    assert len(reader.find_key(str(tmp_path), question("U")).messages) == 2
    table.commit(removed=[table.files["soon-1.parquet"]])
    remove_file(table.folder, "soon-1.parquet")
    assert [each.arrival for each in reader.find_key(str(tmp_path), question("U")).messages] == [2]
    assert len(reader._indexes._known) == 1


def test_rows_of_an_earlier_version_are_found(tmp_path: Path) -> None:
    append(tmp_path, *[keyed_row(1_000 + n, n, unique=f"U{n}", keys=f"K{n} all") for n in range(50)])
    assert found(tmp_path, question("U20")) == [20]
    assert found(tmp_path, question("K21")) == [21]
    assert len(found(tmp_path, question("all"))) == 50
    assert upper(-1) == 0xFFFFFFFF
