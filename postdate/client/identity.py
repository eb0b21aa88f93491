"""Who we are: client ids and the unique keys of messages."""

import os
import random
import socket

from postdate.clock import SystemClock
from postdate.message import LOOPBACK, UniqueKeys

_SOMEWHERE = ("192.0.2.1", 9)  # an address that nobody has; connecting a datagram socket sends nothing


def local_address() -> bytes:
    """The address of this machine towards the world; that of loopback where it has none. Asks no name server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_SOMEWHERE)
        except OSError:
            return LOOPBACK.address
        return socket.inet_aton(probe.getsockname()[0])


def new_client_id() -> str:
    """An id for one member of a group, in RocketMQ's form: ip@pid#nanoseconds."""
    return f"{socket.inet_ntoa(local_address())}@{os.getpid()}#{SystemClock().elapsed_ns()}"


def new_unique_keys() -> UniqueKeys:
    return UniqueKeys(local_address(), os.getpid(), random.getrandbits(32))
