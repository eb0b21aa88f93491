"""The columns of the table, as Arrow. The same file is read by the driver, by executors and by `check`."""

import pyarrow as pa

MESSAGE, CANCEL = 1, 2  # values of `kind`, as in the log

SCHEMA = pa.schema(
    [
        pa.field("due", pa.int64(), nullable=False),  # epoch ms
        pa.field("arrival", pa.int64(), nullable=False),  # place in the log; breaks ties of due
        pa.field("kind", pa.int8(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),  # queue number
        pa.field("level", pa.int8(), nullable=False),
        pa.field("tag_hash", pa.int32(), nullable=False),
        pa.field("unique_hash", pa.int64(), nullable=False),  # the bits of the log's unsigned one: Delta has none
        pa.field("key_hash", pa.int64(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("record", pa.binary(), nullable=False),
    ]
)
ORDER = [("due", "ascending"), ("arrival", "ascending")]
CHUNK_COLUMNS = ["due", "arrival", "queue", "tag_hash", "flags", "unique_hash", "key_hash", "record"]
# Columns with few different values; the others are not worth a dictionary.
_DICTIONARY = ["topic", "tag", "queue", "kind", "level", "tag_hash", "flags"]
ROW_GROUP_ROWS = 8_192
# Statistics tell which row groups a window touches and which hold cancels; of the rest they would only take room.
STATISTICS = ["due", "arrival", "kind"]

WRITER_OPTIONS = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _DICTIONARY,
    "write_statistics": STATISTICS,
    "store_schema": False,
}
