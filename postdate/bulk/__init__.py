"""Bulk: far rows, queues and chunks for programs that move millions of them, over Arrow Flight.

A process of its own beside the broker, so that the interpreter lock of one never delays the other's firing. It reads
the data folder's segments and rows itself and asks the broker only what is durable; the one thing it writes is chunks.

    flight      the doors: actions, do_get, do_put
    stream      a range of the far queue as record batches
    topic       a range of a topic's queue as record batches
    rows        rows of a queue: from the files, and from the broker's memory
    maps        segments and chunks, mapped for reading
    columns     records as columns, without a loop
    properties  what they say of themselves, by name
    dues        when they were due
    texts       texts that lie scattered in a file
    cancels     what a cancel among far rows names
    schema      the columns that go out and come in
    upload      a chunk, as it comes in
    table       the one question that the broker asks back: is this message in the table?
    link        the connection to the broker
    process     the process: how it starts, what it says, when it ends
"""
