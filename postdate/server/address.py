"""How clients reach the broker: at the advertised address, else at the address where the client has connected.

Routes carry it as text. Message ids and delivered records carry it as an IP address: the C++ client sends a message
back to the address in its record, and loses the message where nobody answers there.
"""

import logging
import socket
from asyncio import get_running_loop

from postdate.config import Settings, parse_advertised
from postdate.message import LOOPBACK, Host
from postdate.wire.ids import address_text, host_of

logger = logging.getLogger("postdate.server")


class Address:
    """The address of a broker. Its ports are the bound ones: the settings may leave the choice to the system."""

    def __init__(self, settings: Settings) -> None:
        self.broker_port, self.route_port = settings.broker_port, settings.route_port
        self._name, self._port = parse_advertised(settings.advertise) or ("", 0)
        self._resolved = LOOPBACK

    async def resolve(self) -> None:
        """Looks up the IP address of an advertised name."""
        if not self._name:
            return
        try:
            found = await get_running_loop().getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            logger.warning(
                "the advertised name %s has no address here (%s): C++ consumers cannot send messages back",
                self._name, error,
            )  # fmt: skip
            return
        # IPv4 where there is one: its records and ids are what every client can read.
        *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        self._resolved = host_of(str(address[0]), 0)

    def text(self, local_address: str) -> str:
        """Returns the address for the route of a client that has connected at a local address."""
        return address_text(self._name or local_address, self._bound_port)

    def host(self, local_address: str) -> Host:
        """Returns the address for message ids and delivered records."""
        reached = self._resolved if self._name or not local_address else host_of(local_address, 0)
        return Host(reached.address, self._bound_port)

    @property
    def _bound_port(self) -> int:
        return self._port or self.broker_port
