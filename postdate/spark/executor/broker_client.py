"""The way to the broker for control: state, epoch, stage, report, jobs, topics. Rows go through bulk_client.py.

It speaks remoting (docs/protocol.md) like every other client, and raises what the client raises: Unreachable or
TimedOut where no broker answers, Refused and others with the broker's own sentence. A call is a connection of its own,
so that a client serves any thread, and any process that gets a copy of it.

Spark plans queries with the Python of its executors, so the standard library is all this module needs; frames are
written here as postdate/wire/frame.py draws them.
"""

import json
import socket
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from postdate import contract
from postdate.access.permits import make_permit
from postdate.access.token import TOKEN_USER
from postdate.client.address import Address, attempts, parse_address, route_addresses
from postdate.client.errors import Disconnected, TimedOut, Unavailable, Unreachable, no_broker_at, refusal_of
from postdate.client.security import Login, find_login, signed_fields
from postdate.contract import (
    NO_MARKS,
    BatchSize,
    Figures,
    ImportOrder,
    JobOrder,
    JobStatus,
    NamedQueues,
    Plain,
    QueueSpan,
    Selection,
    Stage,
    State,
    TableMarks,
    dump,
    load,
)
from postdate.errors import FlowControl, ProtocolError, Refused, UsageError
from postdate.wire import codes
from postdate.wire.signature import Credentials

AWAY = (Unreachable, TimedOut, Unavailable, FlowControl)  # a later try may pass

_CONNECT_S = 3.0
_ASK_S = 10.0  # most requests are answered from memory
_WRITE_S = 30.0  # the broker syncs its disk
_STAGE_S = 300.0  # the broker reads and sums up every byte of the chunks, or of what is selected
_MARKS = Struct(">ii")  # length of the frame, and of its header
_LENGTH_BYTES = 4
_HOW_TO_GIVE_IT = (
    "a pipeline needs the token of the broker's data folder: give it with --token-file FILE, POSTDATE_TOKEN_FILE or "
    "POSTDATE_TOKEN"
)
_UNIX, _TLS = "unix:", "tls:"  # begin a place of bulk that is no plain host and port
_ANYWHERE = ("0.0.0.0", "::")  # a process that listens there is reached where its machine is


class _Answer(NamedTuple):
    code: int
    remark: str | None
    body: bytes


class BrokerClient:
    """Asks one broker, or the first of several addresses that answers."""

    def __init__(
        self, address: str | None = None, bulk: str = "", ask_s: float = _ASK_S, token: str | None = None,
        login: Login | None = None,
    ) -> None:  # fmt: skip
        """`address` is the route address, None for that of the environment. `bulk` is used in place of the address of
        bulk that the broker tells. Requests that the broker answers from memory wait for `ask_s` seconds. `login` says
        who asks, None what the environment says of that. A pipeline gives the token of the broker's data folder, empty
        where it has none: with it, requests are signed and go to the broker's own port, as those of no other would be
        taken. Raises UsageError for what is no address, and for a login that cannot be used.
        """
        self._token = token
        self._broker_of: dict[Address, Address] = {}  # by route address, the broker's own
        self._ask_s = ask_s
        self._login = find_login() if login is None else login
        if token:
            self._login = self._login._replace(credentials=Credentials(TOKEN_USER, token))
        self._login.open()
        self._addresses = route_addresses(address)
        self._bulk = _check_place(bulk) if bulk else ""
        self._answered = self._addresses[0]  # the address that has answered last

    @property
    def addresses(self) -> str:
        """All addresses, as `address` of another client takes them."""
        return ";".join(map(str, self._addresses))

    @property
    def address(self) -> str:
        """The address that has answered last."""
        return str(self._answered)

    def bulk_of(self, state: State) -> str:
        """Where bulk listens and the permit for everything that it has, as BulkClient takes them, by the state of its
        broker. Raises Unreachable where none is attached.
        """
        permit = make_permit(self._token, TOKEN_USER, state.now_ms) if self._token else state.permit
        return self._bulk_at(state.bulk, permit or "")

    def bulk(self) -> str:
        """Asks where bulk listens, and for a permit. Raises Unreachable where none is attached."""
        return self.bulk_of(self.state())

    def bulk_for(self, topic: str) -> str:
        """The same with a permit for one topic, which is given to those who may read it. Raises TopicNotFound."""
        answer = self._load(self._ask(contract.GET_BULK_TOPIC, {"topic": topic, "at": -1}))
        fields = contract.Fields(answer, "the queues of a topic")
        return self._bulk_at(fields.text("bulk"), fields.text("permit"))

    def _bulk_at(self, told: str, permit: str) -> str:
        address = self._bulk
        if not address:
            if not told:
                raise Unreachable(f"the broker at {self.address} has no bulk process at the moment; is bulk_port -1?")
            address = told
            if not told.startswith(_UNIX):
                mark = _TLS if told.startswith(_TLS) else ""
                host, port = parse_address(told.removeprefix(_TLS))
                if host in _ANYWHERE:
                    host = "127.0.0.1" if self._answered.is_local else self._answered.host
                address = mark + str(Address(host, port))
        authorities = _read_authorities(self._login.ca_file) if address.startswith(_TLS) else ""
        return f"{address} {permit} {authorities}".rstrip()

    # -- the pipeline -------------------------------------------------------------------------------------------

    def state(self, size: BatchSize | None = None) -> State:
        """Where broker and pipeline are. With a size, `stop` says how far such a batch goes."""
        fields = {} if size is None else {"start": size.start, "rowsMax": size.rows_max, "bytesMax": size.bytes_max}
        return State.read(self._load(self._ask(contract.GET_BULK_STATE, fields)))

    def note(self, sentence: str) -> None:
        """Tells what the pipeline waits for, for people who look; empty where it goes on."""
        self._ask(contract.GET_BULK_STATE, {"note": sentence})

    def register(self, table: str, master: str, marks: TableMarks = NO_MARKS) -> State:
        """Makes the caller the one pipeline that may stage. Raises Refused where the table is not the broker's."""
        body = dump({"table": table, "master": master} | marks._asdict())
        return State.read(self._load(self._ask(contract.REGISTER_PIPELINE, body=body, timeout=_WRITE_S)))

    def stage(self, stage: Stage) -> None:
        """Raises Refused where the broker is elsewhere, or another pipeline has registered."""
        self._ask(contract.STAGE, body=dump(stage.plain()), timeout=_STAGE_S)

    def report(self, figures: Figures) -> None:
        self._ask(contract.REPORT_BATCH, body=dump(figures))

    def stand_ins(self) -> list[Figures]:
        """What bulk has promoted in place of pipelines, a report for each time that is over."""
        reports = self._load(self._ask(contract.GET_STATUS)).get("reports", [])
        return [contract.read_report(each) for each in reports if each.get("master") == contract.BULK]

    def topic(self, name: str, at_ms: int = -1) -> list[QueueSpan]:
        """How far each queue of a topic goes. Raises TopicNotFound."""
        return contract.read_spans(self._load(self._ask(contract.GET_BULK_TOPIC, {"topic": name, "at": at_ms})))

    def named_queues(self) -> NamedQueues:
        """Which queue number is which topic and queue."""
        return NamedQueues.read(self._load(self._ask(contract.GET_BULK_TOPIC)))

    # -- jobs ---------------------------------------------------------------------------------------------------

    def begin_import(self, job_id: str, topic: str) -> ImportOrder:
        """Begins an import, or finds it by its id. Raises Refused, TopicNotFound."""
        return ImportOrder.read(self._job("begin", {"id": job_id, "topic": topic}))

    def adopt(self, job_id: str, files: Sequence[tuple[Any, ...]], bad_count: int) -> JobStatus:
        """Has the pipeline take files that lie beside the table into it. Raises Refused."""
        request = {"id": job_id, "files": contract.plain_files(files), "bad": bad_count}
        return JobStatus.read(self._job("adopt", request))

    def fail_job(self, job_id: str, reason: str) -> JobStatus:
        """Ends a job that has changed nothing. Raises Refused."""
        return JobStatus.read(self._job("fail", {"id": job_id, "reason": reason}))

    def note_progress(self, job_id: str, step: str, done: int, total: int) -> None:
        """Notes how far a job is, for people who look."""
        self._job("progress", {"id": job_id, "step": step, "done": done, "total": total})

    def find_job(self, job_id: str) -> JobStatus:
        """Where a job is. Raises BrokerError for an id that nobody knows."""
        return JobStatus.read(self._job("find", {"id": job_id}))

    def jobs(self) -> list[JobStatus]:
        """All jobs that are known."""
        return contract.read_jobs(self._job("list", {}))

    def order(self, number: int) -> JobOrder:
        """A job, for the pipeline that carries it out."""
        return JobOrder.read(self._job("command", {"number": number}))

    def try_job(self, epoch: int, number: int) -> JobOrder:
        """Notes that a try of a job begins; `refusal` says why there is none. Raises Refused where another pipeline has
        registered.
        """
        return self._attempt("try", epoch, number)

    def stumble(self, epoch: int, number: int, reason: str) -> JobOrder:
        """Notes why a try has failed. Raises Refused."""
        return self._attempt("stumble", epoch, number, reason)

    def leave_job(self, epoch: int, number: int) -> JobOrder:
        """Ends a try that does not count, because the pipeline stops. Raises Refused."""
        return self._attempt("leave", epoch, number)

    def try_again(self, epoch: int, number: int) -> JobOrder:
        """Has the table follow a job that was set aside. Raises Refused."""
        return self._attempt("again", epoch, number)

    def _attempt(self, call: str, epoch: int, number: int, reason: str = "") -> JobOrder:
        return JobOrder.read(self._job(call, {"epoch": epoch, "number": number, "reason": reason}))

    def decide(self, selection: Selection) -> JobOrder:
        """Tells what was selected for a job; the order says which of it came too late. Raises Refused."""
        return JobOrder.read(self._job("decide", selection._asdict()))

    def _job(self, call: str, request: Mapping[str, Any]) -> Plain:
        return self._load(self._ask(contract.JOB, body=dump({"call": call, **request}), timeout=_STAGE_S))

    # -- requests -----------------------------------------------------------------------------------------------

    def _load(self, answer: _Answer) -> Plain:
        return load(answer.body, f"the answer of {self.address}")

    def _ask(
        self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"", timeout: float | None = None
    ) -> _Answer:
        """Raises Unreachable, Disconnected, TimedOut, and what a refusal means."""
        frame = _frame(code, fields or {}, body, self._login.credentials)
        connection, address = self._connect()
        with connection:
            answer = _exchange(connection, address, frame, self._ask_s if timeout is None else timeout)
        if answer.code == codes.NO_PERMISSION and self._token == "":
            raise Refused(f"{answer.remark}; {_HOW_TO_GIVE_IT}")
        if answer.code != codes.SUCCESS:
            raise refusal_of(answer.code, answer.remark)
        return answer

    def _connect(self) -> tuple[socket.socket, Address]:
        for attempt in attempts(self._addresses):
            with attempt as address:
                try:
                    connection = self._open(self._broker_at(address) if self._token else address)
                except (Unreachable, TimedOut):
                    self._broker_of.pop(address, None)  # it may be elsewhere by now
                    raise
                self._answered = address
                return connection, address
        raise AssertionError("an attempt has succeeded, or the last one has raised")

    def _broker_at(self, address: Address) -> Address:
        """The broker's own port, by a route address or by itself: clusters are told to everybody."""
        if address.is_local:
            return address
        if address not in self._broker_of:
            with self._open(address) as connection:
                frame = _frame(contract.GET_BROKER_CLUSTER_INFO, {}, b"", None)
                brokers = self._load(_exchange(connection, address, frame, self._ask_s)).get("brokerAddrTable", {})
            told = [parse_address(each["brokerAddrs"]["0"]) for each in brokers.values()]
            # An address that leads to that port is good as it is: the one that clients are told may not lead here.
            own = next((each for each in told if each.port != address.port), address)
            self._broker_of[address] = address if any(each.port == address.port for each in told) else own
        return self._broker_of[address]

    def _open(self, address: Address) -> socket.socket:
        """Connects. Raises Unreachable, TimedOut."""
        # Read for each connection: other processes have a copy of this object, and files are renewed.
        context = None if address.is_local else self._login.open().tls
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if address.is_local else None
        try:
            if connection is None:
                connection = socket.create_connection(address, _CONNECT_S)
            else:
                connection.settimeout(_CONNECT_S)
                connection.connect(address.host)
            return connection if context is None else context.wrap_socket(connection, server_hostname=address.host)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise TimedOut(f"no connection to {address} within {_CONNECT_S:.1f} s") from None
            if isinstance(error, (OSError, UnicodeError)):
                raise no_broker_at(address, error, is_tls=self._login.tls) from error
            raise


def _check_place(bulk: str) -> str:
    if bulk.startswith(_UNIX):
        return bulk
    return (_TLS if bulk.startswith(_TLS) else "") + str(parse_address(bulk.removeprefix(_TLS)))


def _read_authorities(file: str) -> str:
    """Reads the certificates that bulk's own must come from, as one word: executors have neither our files nor our
    environment. Empty for those of the system. Raises UsageError.
    """
    if not file:
        return ""
    try:
        return b64encode(Path(file).read_bytes()).decode()
    except OSError as error:
        raise UsageError(f"the file {file} of authorities cannot be read: {error.strerror}") from error


def _frame(code: int, fields: Mapping[str, object], body: bytes, credentials: Credentials | None) -> bytes:
    texts = {name: str(value) for name, value in fields.items()}
    header = {
        "code": code, "language": codes.LANGUAGE, "version": codes.PROTOCOL_VERSION, "opaque": 1, "flag": 0,
        "extFields": signed_fields(texts, body, credentials),
    }  # fmt: skip
    text = json.dumps(header).encode()
    return _MARKS.pack(_LENGTH_BYTES + len(text) + len(body), len(text)) + text + body


def _exchange(connection: socket.socket, address: Address, frame: bytes, timeout: float) -> _Answer:
    until = time.monotonic() + timeout
    try:
        connection.settimeout(timeout)
        connection.sendall(frame)
        length = int.from_bytes(_receive(connection, _LENGTH_BYTES, until))
        return _decode(_receive(connection, length, until), address)
    except TimeoutError:
        raise TimedOut(f"no answer from {address} within {timeout:.1f} s") from None
    except OSError as error:
        raise Disconnected(f"{address}: the connection was lost: {error}") from error


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("the broker has closed it")
        received += piece
    return bytes(received)


def _decode(frame: bytes, address: Address) -> _Answer:
    start = _LENGTH_BYTES
    stop = start + int.from_bytes(frame[1:start])
    try:
        header = load(frame[start:stop], "the header")
        return _Answer(int(header["code"]), header.get("remark"), frame[stop:])
    except (ProtocolError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{address} does not speak the protocol: {error!r}") from error
