"""The columns that cross the wire: out of queues (OUT, OF_TOPIC), and into chunks (IN)."""

import pyarrow as pa

OUT = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),  # number of the far row, or offset in the topic's queue
        pa.field("kind", pa.int8(), nullable=False),  # 1 message, 2 cancel, 14 move
        pa.field("topic", pa.string()),
        pa.field("queue", pa.int32(), nullable=False),  # queue number
        pa.field("level", pa.int8(), nullable=False),
        pa.field("due", pa.int64(), nullable=False),
        pa.field("arrival", pa.int64(), nullable=False),
        pa.field("tag_hash", pa.int32(), nullable=False),
        pa.field("unique_hash", pa.int64(), nullable=False),  # both hashes: the bits of an unsigned number
        pa.field("key_hash", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("record", pa.binary(), nullable=False),
    ]
)

# A topic's queue has more columns; a ticket asks for them by name.
OF_TOPIC = pa.schema(
    [
        *OUT,
        pa.field("visible", pa.int64(), nullable=False),  # when it became visible, epoch ms
        pa.field("properties", pa.map_(pa.string(), pa.string())),
        pa.field("body", pa.binary()),
    ]
)

IN = pa.schema(
    [
        ("due", pa.int64()),
        ("arrival", pa.int64()),
        ("queue", pa.int32()),
        ("tag_hash", pa.int32()),
        ("flags", pa.int32()),
        ("unique_hash", pa.int64()),
        ("key_hash", pa.int64()),
        ("record", pa.binary()),
    ]
)
