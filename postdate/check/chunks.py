"""Checks a staged chunk: its sums, its order, and every record against its row."""

import numpy as np

from postdate.check.folder import Folder
from postdate.check.records import Places, keys_problem, known_of_chunk
from postdate.errors import CorruptChunk, CorruptLog, IllegalMessage
from postdate.message import decode_properties
from postdate.storage import chunk as chunks
from postdate.storage import record as records
from postdate.storage.chunk import Chunk


def check_chunk(folder: Folder, base: int, name: str, came_at: int, places: Places) -> np.ndarray | None:
    """Returns what is known of a chunk's records, which came into the wheel at `came_at`; None if it cannot be read."""
    try:
        chunk = Chunk(folder.disk, name)
        chunk.verify()
    except CorruptChunk as error:
        folder.report.find(str(error))
        return None
    folder.report.count("chunks", 1)
    folder.report.count("messages in chunks", len(chunk.index))
    for row in chunk.index.tolist():
        problem = _chunk_record_problem(chunk, row, places)
        if problem:
            folder.report.find(f"{chunks.path_of(name)}, byte {row[2]}: {problem}")
    return known_of_chunk(base, chunk.index, came_at)


def _chunk_record_problem(chunk: Chunk, row: tuple[int, ...], places: Places) -> str:
    _, _, position, size, number, tagged, _, unique_hash, first_hash = row
    try:
        record = records.decode(chunk.read(position, size))
        properties = decode_properties(record.properties)
    except (CorruptLog, IllegalMessage) as error:
        return str(error)
    places.note(number, record.topic, record.queue_id, lambda: f"{chunks.path_of(chunk.name)}, byte {position}")
    return keys_problem(properties, unique_hash, first_hash, tagged)
