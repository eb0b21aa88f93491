"""The server: RocketMQ's remoting protocol on sockets, around one broker.

It runs on one thread and one event loop; flushes and the slow steps of snapshots have threads of their own. Imports
point one way: connection, sessions, requests, dispatch, serve. The broker knows nothing of the server.
"""

from postdate.server.children import Addresses, Part, Parts
from postdate.server.serve import Server, run, serve

__all__ = ["Addresses", "Part", "Parts", "Server", "run", "serve"]
