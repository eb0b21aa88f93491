"""Files mapped for reading: few at once, none that is gone; and which file holds a record."""

from pathlib import Path
from typing import cast

import numpy as np

from postdate.bulk.broker_link import Link, StagedChunk
from postdate.bulk.maps import Maps, RecordFile, RecordFiles
from postdate.storage.chunk import CHUNK_BIT


def test_few_files_stay_mapped(tmp_path: Path) -> None:
    held = Maps(tmp_path, maps_max=3)
    for name in "abcdef":
        (tmp_path / name).write_bytes(name.encode())
        found = held.get(name)
        assert found is not None
        assert found.array.tobytes() == name.encode()
        assert held.count <= 3
    (tmp_path / "e").unlink()
    (tmp_path / "f").unlink()
    (tmp_path / "f").write_bytes(b"another")
    assert held.get("e") is None
    assert held.count == 1, "a map holds the disk's space of a file that is gone"
    found = held.get("f")
    assert found is not None
    assert found.array.tobytes() == b"another"


class ChunkLister:
    """Answers as the link to the broker does, and counts the questions."""

    def __init__(self, *staged: StagedChunk) -> None:
        self.staged = list(staged)
        self.asked_count = 0

    def chunks(self) -> list[StagedChunk]:
        self.asked_count += 1
        return list(self.staged)


def test_offsets_lead_to_segments_and_chunks_in_ascending_order() -> None:
    lister = ChunkLister(StagedChunk(CHUNK_BIT, "a", 100), StagedChunk(CHUNK_BIT + 104, "b", 50))
    files = RecordFiles(1_000, cast(Link, lister))
    offset = np.array([CHUNK_BIT + 110, 1_500, CHUNK_BIT + 20, 1_100, 20, CHUNK_BIT + 102, CHUNK_BIT + 105])
    found = [(file, index.tolist()) for file, index in files.find(offset)]
    assert found == [
        (RecordFile("log/00000000000000000000", 0), [4]),
        (RecordFile("log/00000000000000001000", 1_000), [3, 1]),
        (RecordFile("chunks/a", CHUNK_BIT), [2]),
        (RecordFile("chunks/b", CHUNK_BIT + 104), [6, 0]),
    ], "the offset between two chunks lies in none"


def test_the_list_of_chunks_is_asked_for_again_only_where_an_offset_is_unknown() -> None:
    lister = ChunkLister(StagedChunk(CHUNK_BIT, "a", 100))
    files = RecordFiles(1_000, cast(Link, lister))
    for _ in range(2):
        assert len(list(files.find(np.array([CHUNK_BIT + 1])))) == 1
    assert lister.asked_count == 1
    lister.staged.append(StagedChunk(CHUNK_BIT + 104, "b", 50))
    assert len(list(files.find(np.array([CHUNK_BIT + 1, CHUNK_BIT + 105])))) == 2
    assert lister.asked_count == 2
