"""The layout of every fixed-width row and head that Postdate stores, each with its picture.

The dtype is the format: columns are read and written in place. Where single rows are made on a hot path, a struct of
the same layout stands beside the dtype, since packing one row with numpy costs ten times as much. All numbers are
little-endian. docs/formats.md says what each field means, and a test compares it with this file. The record of a
message is not here: its layout is RocketMQ's, of variable width, and stands in record.py.
"""

from struct import Struct

import numpy as np

CHECKSUM = Struct("<Q")  # xxh3, after the head that it covers

# -- the log ----------------------------------------------------------------------------------------------------

# Head of a batch; the checksum follows it.
#
#   0       4      5         6          8        12      16         24         32         40         48
#   +-------+------+---------+----------+--------+-------+----------+----------+----------+----------+
#   | magic | kind | version | reserved | length | count | offset   | at_ms    | durable  | checksum |
#   +-------+------+---------+----------+--------+-------+----------+----------+----------+----------+
BATCH_HEAD = Struct("<IBBHIIqqq")
BATCH_HEADER_BYTES = BATCH_HEAD.size + CHECKSUM.size
assert BATCH_HEADER_BYTES == 48

# Row of a batch: what the fold needs to know of one record.
#
#   0      1       2       4       8          16            24
#   +------+-------+-------+-------+----------+-------------+
#   | kind | level | flags | queue | due      | unique_hash |
#   +------+-------+-------+-------+----------+-------------+
#   24         32         36     40         44          48
#   +----------+----------+------+----------+-----------+
#   | key_hash | tag_hash | size | position | once_hash |
#   +----------+----------+------+----------+-----------+
ROW = np.dtype(
    [
        ("kind", "u1"),
        ("level", "u1"),  # delay level, 0 = none
        ("flags", "<u2"),  # batch.MORE_KEYS
        ("queue", "<i4"),  # queue number (topics.py), -1 for records that belong to no queue
        ("due", "<i8"),  # epoch ms, 0 = at once
        ("unique_hash", "<u8"),  # of UNIQ_KEY, 0 = none
        ("key_hash", "<u8"),  # of the first of KEYS, 0 = none
        ("tag_hash", "<i4"),
        ("size", "<u4"),  # of the record
        ("position", "<u4"),  # of the record, from the start of the batch
        ("once_hash", "<u4"),  # of topic and id of a message that is stored once, 0 = none
    ]
)
ROW_STRUCT = Struct("<BBHiqQQiIII")
ROW_BYTES = ROW.itemsize
assert ROW_STRUCT.size == ROW_BYTES == 48

# -- rows in files ----------------------------------------------------------------------------------------------

# Entry of a queue: one per message, in the order of consuming.
#
#   0          8      12         20
#   +----------+------+----------+
#   | offset   | size | tag      |
#   +----------+------+----------+
ENTRY = np.dtype([("offset", "<i8"), ("size", "<i4"), ("tag", "<i8")])
ENTRY_STRUCT = Struct("<qiq")
assert ENTRY_STRUCT.size == ENTRY.itemsize == 20

# Time row of a queue: one per instant at which it grew. `offset` is the first entry that came then.
#
#   0          8          16
#   +----------+----------+
#   | at_ms    | offset   |
#   +----------+----------+
TIME = np.dtype([("at_ms", "<i8"), ("offset", "<i8")])
TIME_STRUCT = Struct("<qq")
assert TIME_STRUCT.size == TIME.itemsize == 16

# Row of the far queue: a message, a cancel or the command of a job.
#
#   0          8          16            24         32     36      40
#   +----------+----------+-------------+----------+------+-------+
#   | arrival  | due      | unique_hash | key_hash | size | queue |
#   +----------+----------+-------------+----------+------+-------+
#   40         44     45      46         48
#   +----------+------+-------+----------+
#   | tag_hash | kind | level | reserved |
#   +----------+------+-------+----------+
FAR = np.dtype(
    [
        ("arrival", "<i8"),  # log offset of the record
        ("due", "<i8"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("kind", "u1"),
        ("level", "u1"),
        ("reserved", "<u2"),
    ]
)
FAR_STRUCT = Struct("<qqQQIiiBBH")
assert FAR_STRUCT.size == FAR.itemsize == 48

# Row of the index of keys: one per key of a message. Most messages have two keys, so two rows are packed at once.
#
#   0          8          16
#   +----------+----------+
#   | hash     | offset   |
#   +----------+----------+
INDEX = np.dtype([("hash", "<u8"), ("offset", "<i8")])
INDEX_STRUCT, INDEX_TWO_STRUCT = Struct("<Qq"), Struct("<QqQq")
assert INDEX_STRUCT.size == INDEX_TWO_STRUCT.size // 2 == INDEX.itemsize == 16

# Row of an id under which a message is stored once. The last two are what the answer to its send said.
#
#   0      4      8          16         24         32             40
#   +------+------+----------+----------+----------+--------------+
#   | hash | size | until_ms | offset   | due      | queue_offset |
#   +------+------+----------+----------+----------+--------------+
ONCE_ROW = np.dtype(
    [
        ("hash", "<u4"),  # of topic and id
        ("size", "<u4"),  # of the message's record
        ("until_ms", "<i8"),  # the id is free again from then on
        ("offset", "<i8"),  # of the record in the log
        ("due", "<i8"),  # 0 = at once
        ("queue_offset", "<i8"),  # -1 where it waited
    ]
)
ONCE_ROW_STRUCT = Struct("<IIqqqq")
assert ONCE_ROW_STRUCT.size == ONCE_ROW.itemsize == 40

# -- chunks and selections --------------------------------------------------------------------------------------

# Head of a chunk; its checksum (head_sum) follows it.
#
#   0       4         8           16          24            32
#   +-------+---------+-----------+-----------+-------------+
#   | magic | version | row_count | index_sum | records_sum |
#   +-------+---------+-----------+-----------+-------------+
#   32           40           48            56         64
#   +------------+------------+-------------+----------+
#   | file_bytes | due_low_ms | due_high_ms | head_sum |
#   +------------+------------+-------------+----------+
CHUNK_HEAD = Struct("<IIqQQqqq")
CHUNK_HEADER_BYTES = CHUNK_HEAD.size + CHECKSUM.size
assert CHUNK_HEADER_BYTES == 64

# Row of a chunk, ascending by (due, arrival).
#
#   0          8          16         24     28      32
#   +----------+----------+----------+------+-------+
#   | due      | arrival  | position | size | queue |
#   +----------+----------+----------+------+-------+
#   32         36      40            48         56
#   +----------+-------+-------------+----------+
#   | tag_hash | flags | unique_hash | key_hash |
#   +----------+-------+-------------+----------+
CHUNK_ROW = np.dtype(
    [
        ("due", "<i8"),
        ("arrival", "<i8"),
        ("position", "<i8"),  # of the record, from the start of the file
        ("size", "<u4"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("flags", "<u4"),  # chunk.FLAG_OWN_ARRIVAL
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
    ]
)
assert CHUNK_ROW.itemsize == 56

# Head of a selection. `sum` covers the rows.
#
#   0       4         8       16     24
#   +-------+---------+-------+------+
#   | magic | version | count | sum  |
#   +-------+---------+-------+------+
SELECTION_HEAD = Struct("<IIqQ")
assert SELECTION_HEAD.size == 24

# Row of a selection, ascending by (due, arrival).
#
#   0          8          16            24         32      36      40
#   +----------+----------+-------------+----------+-------+-------+
#   | due      | arrival  | unique_hash | key_hash | queue | flags |
#   +----------+----------+-------------+----------+-------+-------+
SELECTED = np.dtype(
    [
        ("due", "<i8"),
        ("arrival", "<i8"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("queue", "<i4"),
        ("flags", "<u4"),  # bit 0 (NEAR): the row was found in the wheel, and counts nowhere else
    ]
)
assert SELECTED.itemsize == 40

# -- snapshots and the wheel ------------------------------------------------------------------------------------

# Head of a snapshot.
#
#   0       4         8          16
#   +-------+---------+----------+
#   | magic | version | position |
#   +-------+---------+----------+
SNAPSHOT_HEAD = Struct("<IIq")
assert SNAPSHOT_HEAD.size == 16

# Head of a section of a snapshot; the data follow it. The data of the last section are a SECTION_COUNT.
#
#   0      4          12         20
#   +------+----------+----------+
#   | kind | length   | checksum |
#   +------+----------+----------+
SECTION = Struct("<IqQ")
SECTION_COUNT = Struct("<q")
assert SECTION.size == 20

# A piece of the wheel in a snapshot: a SLOT_COUNT, that many slot heads, then the singles of all those slots.
#
#   0          8          16
#   +----------+----------+
#   | due      | count    |
#   +----------+----------+
SLOT_HEAD = np.dtype([("due", "<i8"), ("count", "<i8")])
SLOT_COUNT = Struct("<q")
assert SLOT_HEAD.itemsize == 16

# Single: one waiting message in a slot of the wheel.
#
#   0          8      12      16         20            28         36
#   +----------+------+-------+----------+-------------+----------+
#   | offset   | size | queue | tag_hash | unique_hash | key_hash |
#   +----------+------+-------+----------+-------------+----------+
SINGLE = np.dtype(
    [
        ("offset", "<i8"),  # in the log; also the arrival
        ("size", "<u4"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
    ]
)
SINGLE_STRUCT = Struct("<qIiiQQ")
SINGLE_BYTES = SINGLE.itemsize
assert SINGLE_STRUCT.size == SINGLE_BYTES == 36

# Row of a page of the wheel, as bulk sends it on: never stored.
#
#   0          8          16         24            32         40     44      48         52
#   +----------+----------+----------+-------------+----------+------+-------+----------+
#   | due      | arrival  | offset   | unique_hash | key_hash | size | queue | tag_hash |
#   +----------+----------+----------+-------------+----------+------+-------+----------+
NEAR = np.dtype(
    [
        ("due", "<i8"),
        ("arrival", "<i8"),
        ("offset", "<i8"),  # of the record, in the log or in a chunk
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
    ]
)
assert NEAR.itemsize == 52
