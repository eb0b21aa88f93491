"""How clients reach the broker: as the settings advertise it, else where each client has reached us already.

It stands in routes as text. In message ids and in records that are delivered it stands as an IP address: the C++
client sends a message back to the address in its record, and loses it where nobody answers there.
"""

import logging
import socket
from asyncio import get_running_loop

from postdate.config import Settings, advertised
from postdate.message import LOOPBACK, Host
from postdate.wire.ids import address_text, host_of

logger = logging.getLogger("postdate.server")


class Address:
    """Of one broker. `broker_port` is the one that is bound: the settings may leave it to the system."""

    def __init__(self, settings: Settings) -> None:
        self.broker_port = settings.broker_port
        self._name, self._port = advertised(settings.advertise) or ("", 0)
        self._resolved = LOOPBACK

    async def resolve(self) -> None:
        """Finds the IP address of a name that is advertised."""
        if not self._name:
            return
        try:
            found = await get_running_loop().getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            logger.warning(
                "%s, which is advertised, has no address here (%s): C++ consumers cannot send messages back",
                self._name, error,
            )  # fmt: skip
            return
        # IPv4 where there is one: its records and ids are what every client can read.
        *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        self._resolved = host_of(str(address[0]), 0)

    def text(self, local_address: str) -> str:
        """As a route says it to a client that has reached us at a local address."""
        return address_text(self._name or local_address, self._bound_port)

    def host(self, local_address: str) -> Host:
        """As ids and delivered records say it."""
        reached = self._resolved if self._name or not local_address else host_of(local_address, 0)
        return Host(reached.address, self._bound_port)

    @property
    def _bound_port(self) -> int:
        return self._port or self.broker_port
