"""A client of the gRPC port for tests, by grpcio's own HTTP/2: it calls methods by their names, with our messages.

    client = GrpcPeer(served)
    client.call("QueryRoute", topic={"name": "orders"})

Every client has a connection of its own. Nothing here sleeps: a call that waits is begun, and read after what wakes it.
"""

import hmac
import itertools
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from postdate.clock import ManualClock
from postdate.server.grpc.connection import GrpcConnection
from postdate.server.grpc.service import GrpcService
from postdate.wire import messaging
from postdate.wire.messaging import MESSAGES, SERVICE_PATH, requests_of
from postdate.wire.signature import Credentials
from postdate.wire.translation import of_ms, to_ms
from tests.support.core import T0
from tests.support.server import WAIT_S, Served, serving

GROUP = "workers"
DATE = "20300101T000000Z"
MINUTE_MS = 60_000
_ids = itertools.count(1)


class Received(NamedTuple):
    """The answer to a receive."""

    status: Any
    messages: list[Any]
    delivered_at_ms: int

    @property
    def code(self) -> int:
        return int(self.status.code)

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.messages]

    @property
    def message(self) -> Any:
        """The only one."""
        (message,) = self.messages
        return message

    @property
    def handles(self) -> list[str]:
        return [handle_of(message) for message in self.messages]


class Telemetry:
    """The stream by which a client says its settings. It is read as far as a test asks."""

    def __init__(self, peer: "GrpcPeer") -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        command = MESSAGES["TelemetryCommand"]
        method = peer.channel.stream_stream(
            SERVICE_PATH + "Telemetry", request_serializer=command.SerializeToString,
            response_deserializer=command.FromString,
        )  # fmt: skip
        self.call = method(iter(self._requests.get, None), metadata=peer.metadata(), timeout=WAIT_S)

    def write(self, **fields: Any) -> None:
        self._requests.put(MESSAGES["TelemetryCommand"](**fields))

    def say(self, **settings: Any) -> Any:
        """Says settings; returns the answer."""
        self.write(settings=settings)
        return next(self.call)

    def end(self) -> None:
        self._requests.put(None)

    def read_end(self) -> tuple[Any, str]:
        """Reads up to the end; returns its status and text."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


class GrpcPeer:
    """One client with one connection."""

    def __init__(
        self, served: Served, client_id: str = "c1", credentials: Credentials | None = None, *, ca: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        assert served.server.grpc_address is not None
        # Channels of one address would share a connection, and calls in flight would be one client's.
        options = [
            ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1),
        ]  # fmt: skip
        address = served.server.grpc_address
        if ca is None:
            self.channel = grpc.insecure_channel(address, options)
        else:
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
        self.client_id, self.credentials = client_id, credentials
        self._headers = dict(headers or {})

    def metadata(self) -> tuple[tuple[str, str], ...]:
        headers = {"x-mq-language": "PYTHON", "x-mq-date-time": DATE, "x-mq-request-id": str(next(_ids))}
        if self.client_id:
            headers["x-mq-client-id"] = self.client_id
        if self.credentials is not None:
            headers["authorization"] = authorization(self.credentials)
        return tuple((headers | self._headers).items())

    def begin(self, name: str, *, timeout_s: float = WAIT_S, **fields: Any) -> Any:
        """Begins a call; returns its future."""
        request, answer = requests_of(name)
        method = self.channel.unary_unary(
            SERVICE_PATH + name, request_serializer=request.SerializeToString, response_deserializer=answer.FromString
        )
        return method.future(request(**fields), metadata=self.metadata(), timeout=timeout_s)

    def call(self, name: str, **fields: Any) -> Any:
        return self.begin(name, **fields).result()

    def code(self, name: str, **fields: Any) -> int:
        """Returns the code of the status of an answer."""
        return int(self.call(name, **fields).status.code)

    def round_trip(self) -> None:
        """Returns when all that was begun before has been taken in."""
        self.call("QueryRoute", topic={"name": "round-trip"})

    def telemetry(self) -> Telemetry:
        return Telemetry(self)

    # -- producers ----------------------------------------------------------------------------------------------

    def send(self, topic: str, *bodies: str | bytes, **system: Any) -> Any:
        """Sends messages of one kind in one call; returns the answer."""
        return self.call("SendMessage", messages=[message(topic, body, **system) for body in bodies or ("hello",)])

    def sent(self, topic: str, body: str | bytes = "hello", **system: Any) -> Any:
        """Sends one message, which must succeed; returns its result."""
        answer = self.send(topic, body, **system)
        assert answer.status.code == messaging.OK, answer
        (entry,) = answer.entries
        return entry

    # -- consumers ----------------------------------------------------------------------------------------------

    def begin_receive(
        self, topic: str = "orders", *, group: str = GROUP, wait_ms: int = 20_000, invisible_ms: int = 0,
        count_max: int = 32, tags: str = "*", timeout_s: float = WAIT_S, **fields: Any,
    ) -> Any:  # fmt: skip
        """Begins a receive, which renews what it gets unless an invisible time is given; returns its stream."""
        request, answer = requests_of("ReceiveMessage")
        if invisible_ms:
            fields["invisible_duration"] = of_ms(invisible_ms)
        else:
            fields.setdefault("auto_renew", True)
        if wait_ms:
            fields["long_polling_timeout"] = of_ms(wait_ms)
        fields.setdefault("filter_expression", {"type": messaging.FILTER_TAG, "expression": tags})
        method = self.channel.unary_stream(
            SERVICE_PATH + "ReceiveMessage", request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )  # fmt: skip
        asked = request(
            group={"name": group}, message_queue={"topic": {"name": topic}, "id": -1}, batch_size=count_max, **fields
        )
        return method(asked, metadata=self.metadata(), timeout=timeout_s)

    def receive(self, topic: str = "orders", *, wait_ms: int = 1, **how: Any) -> Received:
        """Receives what there is."""
        return read(self.begin_receive(topic, wait_ms=wait_ms, **how))

    def acknowledge(self, *handles: str, topic: str = "orders", group: str = GROUP) -> Any:
        entries = [{"message_id": f"id-of-{handle}", "receipt_handle": handle} for handle in handles]
        return self.call("AckMessage", group={"name": group}, topic={"name": topic}, entries=entries)

    def change(self, handle: str, invisible_ms: int, **fields: Any) -> Any:
        return self.call(
            "ChangeInvisibleDuration", group={"name": GROUP}, topic={"name": "orders"}, receipt_handle=handle,
            invisible_duration=of_ms(invisible_ms), **fields,
        )  # fmt: skip

    def forward(self, handle: str, **fields: Any) -> int:
        named = {"group": {"name": GROUP}, "topic": {"name": "orders"}, "receipt_handle": handle}
        return self.code("ForwardMessageToDeadLetterQueue", **(named | fields))

    def close(self) -> None:
        self.channel.close()


@contextmanager
def serving_grpc(folder: Path, **settings: Any) -> Iterator[Served]:
    """A server with this port and a clock that is moved by hand."""
    with serving(folder, ManualClock(T0), grpc_port=0, **settings) as served:
        yield served


@contextmanager
def calling(
    served: Served, client_id: str = "c1", credentials: Credentials | None = None, **how: Any
) -> Iterator[GrpcPeer]:
    peer = GrpcPeer(served, client_id, credentials, **how)
    try:
        yield peer
    finally:
        peer.close()


def message(topic: str, body: str | bytes = "hello", **system: Any) -> Any:
    """A message as a client makes it."""
    properties = system.pop("user_properties", {})
    number = next(_ids)
    fields = {
        "message_id": f"01{number:032X}", "born_timestamp": of_ms(T0), "born_host": "tests",
        "body_encoding": messaging.IDENTITY, "message_type": messaging.NORMAL, **system,
    }  # fmt: skip
    return MESSAGES["Message"](
        topic={"name": topic}, body=body.encode() if isinstance(body, str) else body, user_properties=properties,
        system_properties=fields,
    )  # fmt: skip


def read(stream: Any) -> Received:
    """Reads a receive to its end."""
    status: Any = None
    messages: list[Any] = []
    delivered_at_ms = -1
    for part in stream:
        if part.HasField("status"):
            assert (status, messages) == (None, []), "the status comes first, and once"
            status = part.status
        elif part.HasField("message"):
            messages.append(part.message)
        else:
            delivered_at_ms = to_ms(part.delivery_timestamp)
    return Received(status, messages, delivered_at_ms)


def handle_of(message: Any) -> str:
    return str(message.system_properties.receipt_handle)


def attempt_of(message: Any) -> int:
    return int(message.system_properties.delivery_attempt)


def authorization(credentials: Credentials, *, scope: str = "", is_upper: bool = False) -> str:
    signature = hmac.new(credentials.secret_key.encode(), DATE.encode(), sha1).hexdigest()
    return (
        f"MQv2-HMAC-SHA1 Credential={credentials.access_key}{scope}, SignedHeaders=x-mq-date-time, "
        f"Signature={signature.upper() if is_upper else signature}"
    )


def service_of(served: Served) -> GrpcService:
    """The service of a server with which somebody is connected."""

    def find() -> GrpcService:
        connection = next(each for each in served.dispatcher.connections if isinstance(each, GrpcConnection))
        service = connection._handler
        assert isinstance(service, GrpcService)
        return service

    return served.call(find)


def pass_with_ticks(served: Served, service: GrpcService, span_ms: int, step_ms: int = 5_000) -> None:
    """Moves a manual clock in steps, after each of which the service does what it does every few seconds."""
    for _ in range(span_ms // step_ms):
        served.pass_ms(step_ms)
        served.call(service.tick)
        served.settle()
