"""RocketMQ's remoting protocol without I/O: bytes in, values out, and back.

Reading is lenient, because clients differ: a number may come as a string or bare, a flag as "true" or "1". Writing is
exact. Bytes of a peer that cannot be read raise ProtocolError.
"""
