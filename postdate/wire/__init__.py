"""RocketMQ's remoting protocol without I/O: bytes in, values out, and back.

    frame.py       frames, and the header in both serializations
    requests.py    the table of requests: code, handler, fields, answer; and the fast way to read a send
    codes.py       the codes of answers and the bits of flags
    bodies.py      what travels in bodies: routes, heartbeats, locks, batches of messages
    records.py     the records of an answer to a pull
    ids.py         message ids and recall handles
    reports.py     bodies of answers to operators
    allocation.py  which member of a group reads which queue

Reading is lenient, because clients differ: a number may come as a string or bare, a flag as "true" or "1". Writing is
exact. Bytes of a peer that cannot be read raise ProtocolError.
"""
