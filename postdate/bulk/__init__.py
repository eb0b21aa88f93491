"""Bulk: far rows, queues and chunks for programs that move millions of them, over Arrow Flight.

Bulk is a process of its own beside the broker, so that the interpreter lock of one never delays the firing of the
other. It reads segments and rows from the data folder, asks the broker which of them are durable, and writes chunks and
selections.

    process      starts the process, answers the broker's questions about the table, ends
    flight       the Flight server: do_get, do_put
    broker_link  the connection to the broker
    rows         rows of a queue: from files, and from the broker's memory
    maps         segments and chunks, mapped for reading; which of them holds a record
    arrow        records as Arrow columns
    streams      the far queue, a topic's queue and the wheel as record batches
    upload       chunks and selections that come in
    promoting    promotes what falls due in the table where no pipeline does
    schema       the columns that go out and come in
"""
