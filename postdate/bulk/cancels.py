"""Cancels among far rows: their topic and key are those of the message that they name, which stand in their record."""

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from postdate.bulk.arrow import Columns
from postdate.storage import record as records


def with_cancels(found: Columns, is_cancel: np.ndarray) -> Columns:
    """The same columns, where the rows of cancels have what the cancel says. They are few: one by one."""
    if not is_cancel.any():
        return found
    mask = pa.array(is_cancel)
    said = [orjson.loads(records.decode(record).body) for record in found.record.filter(mask).to_pylist()]
    topics, keys = (pa.array([each[name] for each in said], pa.string()) for name in ("topic", "key"))
    return found._replace(
        topic=pc.replace_with_mask(found.topic, mask, topics), key=pc.replace_with_mask(found.key, mask, keys)
    )
