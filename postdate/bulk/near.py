"""What waits in the wheel, as record batches: the broker says where each record lies, page by page. What falls due
meanwhile may be missed: a page is of its own moment.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from postdate.bulk.broker_link import Link
from postdate.bulk.arrow import columns
from postdate.bulk.maps import Maps
from postdate.bulk.places import Places
from postdate.bulk.schema import OUT
from postdate.bulk.streams import pieces, plain
from postdate.storage.batch import MESSAGE


def near_batches(link: Link, maps: Maps, segment_bytes: int) -> Iterator[pa.RecordBatch]:
    """In the order of (due, arrival). Raises CorruptLog."""
    places = Places(segment_bytes, link)
    for rows in link.near():
        for piece in pieces(rows["size"]):
            batch = _batch(rows[piece], places, maps)
            if batch.num_rows:
                yield batch


def _batch(rows: np.ndarray, places: Places, maps: Maps) -> pa.RecordBatch:
    parts, order = [], []
    for place, index in places.of(rows["offset"]):
        data = maps.get(place.path)
        if data is not None:
            own = rows[index]
            found = columns(data, own["offset"] - place.base, own["size"].astype(np.int64))
            nothing = np.zeros(len(own), np.int64)
            parts.append(
                pa.RecordBatch.from_arrays(
                    [
                        pa.array(nothing), pa.array(np.full(len(own), MESSAGE, np.int8)), found.topic,
                        plain(own, "queue", np.int32), pa.array(nothing.astype(np.int8)), plain(own, "due", np.int64),
                        plain(own, "arrival", np.int64), plain(own, "tag_hash", np.int32),
                        plain(own, "unique_hash", np.int64), plain(own, "key_hash", np.int64), found.key, found.tag,
                        found.record,
                    ],
                    schema=OUT,
                )
            )  # fmt: skip
            order.append(index)
    if not parts:
        return pa.RecordBatch.from_pylist([], OUT)
    return pa.concat_batches(parts).take(pa.array(np.argsort(np.concatenate(order))))
