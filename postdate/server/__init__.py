"""The server: RocketMQ's remoting protocol on sockets, around one broker.

    serve.py       listening sockets, start and stop
    parts.py       the processes beside the broker
    connection.py  one client: bytes to requests, answers back
    service.py     which request goes to whom
    producers.py   send, batch, recall, delete marker
    pulls.py       pull, and wait for what is not there yet
    consumers.py   heartbeats, members, offsets, locks, send-backs
    admin.py       topics, groups, what waits
    routes.py      what a name server is asked
    messages.py    single messages, entries of queues
    clients.py, relays.py               who is connected, and questions handed on to them
    questions.py   questions to clients, and their answers
    pipelines.py, table.py              what a pipeline asks for, and what it is asked
    progress.py    how far groups are, and how an operator moves them
    status.py, meter.py                 figures, rates and settings, for operators
    tasks.py       answers that take long, worked out in steps
    topics.py      topics and groups on first use
    members.py, locks.py, offsets.py    who is connected, who holds a queue, how far a group has read
    address.py     how clients reach the broker
    answers.py     how an error becomes an answer
    pulse.py       flush, settle, fire: what makes the broker live
    alarm.py       rings at the next due instant

It runs on one thread and one event loop; flushes and the slow steps of snapshots have threads of their own. The broker
knows nothing of it.
"""

from postdate.server.children import Addresses, Part, Parts
from postdate.server.serve import Server, run, serve

__all__ = ["Addresses", "Part", "Parts", "Server", "run", "serve"]
