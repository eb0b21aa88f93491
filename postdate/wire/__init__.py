"""RocketMQ's remoting protocol without I/O: bytes in, values out, and back.

    frame.py    frames, and the header in both serializations
    sends.py    the header of a send, read in one step
    codes.py    the numbers of requests and answers
    schema.py   one row per request: which fields it has, which its answer has
    bodies.py   what travels in bodies: routes, heartbeats, locks, batches of messages
    records.py  the records of an answer to a pull
    ids.py      message ids and recall handles

Reading is lenient, because clients differ: a number may come as a string or bare, a flag as "true" or "1". Writing is
exact. Whatever a peer sends that cannot be read is a ProtocolError.
"""
