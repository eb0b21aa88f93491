"""The server: RocketMQ's remoting protocol on sockets, around one broker.

    serve.py        listening sockets, start and stop
    connection.py   one client: bytes to frames, answers back
    connections.py  all clients: how many, how silent, how much memory
    dispatch.py     which object answers which request
    requests/       one file for each kind of request
    sessions/       what the server remembers of its clients
    pulse.py        flush, settle, fire: drives the broker
    alarm.py        rings at the next due instant
    answers.py      how an error becomes an answer
    tasks.py        answers that take long
    address.py      how clients reach the broker
    children.py     the processes beside the broker

It runs on one thread and one event loop; flushes and the slow steps of snapshots have threads of their own. Imports
point one way: connection, sessions, requests, dispatch, serve. The broker knows nothing of the server.
"""

from postdate.server.children import Addresses, Part, Parts
from postdate.server.serve import Server, run, serve

__all__ = ["Addresses", "Part", "Parts", "Server", "run", "serve"]
