"""The service: which request goes to whom. One table, one loop over the frames of a read, one write of the answers."""

from collections.abc import Callable, Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import PostdateError, ProtocolError
from postdate.server.address import Address
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.server.connections import Connections
from postdate.server.pulse import Pulse
from postdate.server.requests.assignments import Assignments
from postdate.server.requests.auto_creation import Birth
from postdate.server.requests.clients import Clients
from postdate.server.requests.find import Lookups
from postdate.server.requests.group import Consumers
from postdate.server.requests.jobs import Jobs
from postdate.server.requests.messages import Messages
from postdate.server.requests.pending import Pending
from postdate.server.requests.pipeline import Pipelines
from postdate.server.requests.pop import Pops
from postdate.server.requests.progress import Progress
from postdate.server.requests.pull import Pulls
from postdate.server.requests.route import Routes
from postdate.server.requests.send import SEND_CODES, Producers
from postdate.server.requests.status import Status
from postdate.server.requests.topic import Admin
from postdate.server.sessions.members import Members
from postdate.server.sessions.meter import Meter
from postdate.server.sessions.offsets import Offsets
from postdate.server.sessions.questions import Questions
from postdate.server.sessions.relays import Relays
from postdate.server.sessions.senders import Senders
from postdate.server.sessions.table import Table
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import HEADER_AT, Command, decode, header_end, reply
from postdate.wire.schema import REQUESTS, values

Handler = Callable[[Connection, Command, Mapping[str, Any]], bytes | None]
_PULL_CODES = frozenset({codes.PULL_MESSAGE, codes.LITE_PULL_MESSAGE})
_WRITE_BYTES = 1 << 20  # answers of one read are written when they have come to this


class _Answers:
    """The answers of one read, written together; before that only where they have become much."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes | None) -> bool:
        """Takes an answer in, if there is one; returns whether the client cannot take any more for now."""
        if frame is None:
            return False
        self._frames.append(frame)
        self._size += len(frame)
        if self._size < _WRITE_BYTES:
            return False
        self.write()
        return self._connection.is_paused

    def write(self) -> None:
        if self._frames:
            self._connection.write(self._frames[0] if len(self._frames) == 1 else b"".join(self._frames))
            self._frames, self._size = [], 0


class Service:
    """Everything that one broker answers. One for all listening sockets."""

    def __init__(self, broker: Broker, clock: Clock, address: Address) -> None:
        self._broker = broker
        self.address = address
        self._clock = clock
        self._turn_ns = broker.settings.turn_ms_max * 1_000_000
        self.connections = Connections(broker, clock)
        offsets = Offsets(broker)
        members, senders = Members[Connection](broker), Senders[Connection](broker)
        birth, tasks = Birth(broker, clock), Tasks(broker, "counts_max")
        self._meter = Meter(broker, clock.elapsed_ns())
        self.pulls = Pulls(broker, offsets, members, birth, self._meter)
        self._fold = broker.fold
        self.pulse = Pulse(broker, clock, self._wake)
        self.pops = Pops(broker, clock, self.pulse, self.pulls, birth, self._meter)
        self._assignments = Assignments(broker, clock, birth, members)
        self.questions = Questions()
        self._table_reader = Table(broker, self.questions)
        self._producers = Producers(broker, clock, self.pulse, birth, self._table_reader)
        self.consumers = Consumers(broker, clock, self.pulse, self.pulls, birth, members, senders, offsets)
        self.admin = Admin(broker, clock, offsets, birth, self._meter, tasks)
        self._pending = Pending(broker, clock, self._table_reader, tasks)
        self._routes = Routes(broker, birth)
        relays = Relays(broker, self.questions)
        self._clients = Clients(broker, clock, members, senders, offsets, relays, tasks)
        self._progress = Progress(
            broker, clock, self.pulse, self.pulls, self.pops, members, offsets, self._meter, tasks
        )
        self._messages = Messages(broker)
        self._pipelines = Pipelines(broker, clock, self.pulse, tasks, self._table_reader)
        self._jobs = Jobs(broker, clock, tasks, self._pipelines.settled)
        self.status = Status(broker, clock, self._meter, self._counts, self._pipelines.last_reports)
        self._lookups = Lookups(broker)
        self._handlers = self._table()

    def _wake(self) -> None:
        """After a flush: whoever waits for messages is given what has come."""
        fold = self._fold
        if not (fold.grown or fold.pops.freed or fold.pops.spent):
            return
        grown = set(fold.grown)
        fold.grown.clear()
        self._meter.grew(grown)
        self.pulls.wake(grown)
        self.pops.wake(grown)

    def _table(self) -> dict[int, Handler]:
        consumers, admin, pops = self.consumers, self.admin, self.pops
        return {
            codes.RECALL_MESSAGE: self._producers.recall,
            codes.HEART_BEAT: consumers.heart_beat,
            codes.UNREGISTER_CLIENT: consumers.unregister,
            codes.GET_CONSUMER_LIST_BY_GROUP: consumers.consumer_list,
            codes.QUERY_CONSUMER_OFFSET: consumers.query_offset,
            codes.UPDATE_CONSUMER_OFFSET: consumers.update_offset,
            codes.GET_MAX_OFFSET: consumers.max_offset,
            codes.GET_MIN_OFFSET: consumers.min_offset,
            codes.SEARCH_OFFSET_BY_TIMESTAMP: consumers.search_offset,
            codes.GET_EARLIEST_MSG_STORETIME: consumers.earliest_time,
            codes.QUERY_MESSAGE: self._lookups.query,
            codes.VIEW_MESSAGE_BY_ID: self._lookups.view,
            codes.LOCK_BATCH_MQ: consumers.lock,
            codes.UNLOCK_BATCH_MQ: consumers.unlock,
            codes.CONSUMER_SEND_MSG_BACK: consumers.send_back,
            codes.CHECK_CLIENT_CONFIG: consumers.check_subscription,
            codes.POP_MESSAGE: pops.pop,
            codes.ACK_MESSAGE: pops.acknowledge,
            codes.BATCH_ACK_MESSAGE: pops.acknowledge_batch,
            codes.CHANGE_MESSAGE_INVISIBLETIME: pops.change,
            codes.QUERY_ASSIGNMENT: self._assignments.query,
            codes.SET_MESSAGE_REQUEST_MODE: self._assignments.set_mode,
            codes.UPDATE_AND_CREATE_TOPIC: admin.put_topic,
            codes.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
            codes.GET_TOPIC_STATS_INFO: admin.topic_stats,
            codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: admin.put_group,
            codes.DELETE_SUBSCRIPTIONGROUP: admin.delete_group,
            codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: admin.group_list,
            codes.GET_TOPIC_CONFIG: admin.topic_settings,
            codes.GET_PENDING: self._pending.pending,
            codes.GET_FORECAST: self._pending.forecast,
        } | self._table_for_tools()

    def _table_for_tools(self) -> dict[int, Handler]:
        """What a name server is asked, and what only operators ask."""
        routes, clients, progress, status = self._routes, self._clients, self._progress, self.status
        return {
            codes.GET_ROUTEINFO_BY_TOPIC: routes.route,
            codes.GET_BROKER_CLUSTER_INFO: routes.cluster,
            codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: routes.topic_list,
            codes.DELETE_TOPIC_IN_NAMESRV: routes.forget_topic,
            codes.WIPE_WRITE_PERM_OF_BROKER: routes.wipe_write,
            codes.ADD_WRITE_PERM_OF_BROKER: routes.add_write,
            codes.GET_KV_CONFIG: routes.get_value,
            codes.DELETE_KV_CONFIG: routes.delete_value,
            codes.GET_NAMESRV_CONFIG: status.settings,
            codes.GET_BROKER_CONFIG: status.settings,
            codes.UPDATE_BROKER_CONFIG: status.change_settings,
            codes.GET_BROKER_RUNTIME_INFO: status.figures,
            codes.VIEW_BROKER_STATS_DATA: status.rates,
            codes.GET_CONSUMER_CONNECTION_LIST: clients.consumers,
            codes.GET_PRODUCER_CONNECTION_LIST: clients.producers,
            codes.GET_ALL_PRODUCER_INFO: clients.all_producers,
            codes.QUERY_TOPIC_CONSUME_BY_WHO: clients.readers,
            codes.GET_CONSUMER_RUNNING_INFO: clients.running_info,
            codes.CONSUME_MESSAGE_DIRECTLY: clients.consume_directly,
            codes.GET_CONSUME_STATS: progress.of_group,
            codes.GET_BROKER_CONSUME_STATS: progress.of_all,
            codes.INVOKE_BROKER_TO_RESET_OFFSET: progress.reset,
            codes.QUERY_CONSUME_QUEUE: self._messages.entries,
        } | self._table_for_pipelines()

    def _table_for_pipelines(self) -> dict[int, Handler]:
        pipelines = self._pipelines
        return {
            codes.GET_BULK_STATE: pipelines.state,
            codes.GET_BULK_RANGE: pipelines.rows,
            codes.REGISTER_PIPELINE: pipelines.register,
            codes.STAGE: pipelines.stage,
            codes.REPORT_BATCH: pipelines.report,
            codes.GET_STATUS: self.status.overview,
            codes.ATTACH_TABLE: self._table_reader.attach,
            codes.GET_NEAR: pipelines.near,
            codes.JOB: self._jobs.answer,
            codes.GET_CHUNKS: pipelines.chunks,
            codes.GET_BULK_TOPIC: pipelines.topic,
        }

    @property
    def settings(self) -> Settings:
        """As they are at this moment."""
        return self._broker.settings

    def _counts(self) -> Mapping[str, int]:
        """What operators are told about the server itself."""
        return {"connections": len(self.connections), "held_pulls": self.pulls.held_count}

    # -- connections --------------------------------------------------------------------------------------------

    def welcome(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        return self.connections.add(connection)

    def farewell(self, connection: Connection) -> None:
        if self.connections.remove(connection):
            self.pulls.drop(connection)
            self.pops.drop(connection)
            self.consumers.drop(connection)
            self._table_reader.drop(connection)
            self.questions.drop(connection)

    # -- requests -----------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, frames: list[bytes]) -> int:
        """Handles the requests of a read, in order; returns how many. Fewer than all where the client does not read
        its answers, sent what cannot be read, or has had its turn: what waits for the disk here, as making a topic
        does, keeps everybody waiting.

        Each request is done with before the next is looked at: what is made for it is small and dies young, which is
        a quarter faster than doing all of a read step by step.
        """
        producers, answers = self._producers, _Answers(connection)
        now_ms = self._clock.now_ms()
        handled = turn_end_ns = 0
        try:
            for frame in frames:
                handled += 1
                if producers.collect_usual(connection, frame, now_ms):
                    continue
                command = self._decoded(frame)
                if command.code in SEND_CODES:
                    producers.collect(connection, command, now_ms)
                    continue
                producers.write(connection, now_ms)
                if answers.add(self._answer(connection, command)):
                    break
                at_ns = self._clock.elapsed_ns()
                turn_end_ns = turn_end_ns or at_ns + self._turn_ns
                if at_ns > turn_end_ns:
                    break
        except ProtocolError as error:
            connection.fail(error)
        except RecursionError:
            connection.fail(ProtocolError(_NESTED))
        finally:
            # Even after a mistake of ours: what is left collected would be answered to the next connection.
            producers.write(connection, now_ms)
            self.pops.write()
            answers.write()
            self.pulse.nudge()
        return handled

    def _decoded(self, frame: bytes) -> Command:
        """Raises ProtocolError, also for a header that is so long that others would wait for us to read it."""
        header_bytes, limit = header_end(frame) - HEADER_AT, self._broker.settings.json_bytes_max
        if header_bytes > limit:
            raise ProtocolError(f"json_bytes_max: a header of {header_bytes} bytes, the limit is {limit}")
        return decode(frame)

    def _answer(self, connection: Connection, command: Command) -> bytes | None:
        """The answer to a request that is not a send; None where it comes later, or not at all."""
        if command.is_response:
            self.questions.answered(connection, command)  # or to a notice: clients answer some although they need not
            return None
        try:
            if command.code in _PULL_CODES:
                answer = self.pulls.pull(connection, command)
            else:
                answer = self._dispatch(connection, command)
        except (PostdateError, OSError) as error:
            answer = refusal(command, error)
        except RecursionError:  # a value that is a thousand lists deep cannot even be shown in a sentence
            answer = refusal(command, ProtocolError(_NESTED))
        return None if command.is_oneway else answer

    def _dispatch(self, connection: Connection, command: Command) -> bytes | None:
        handler = self._handlers.get(command.code)
        if handler is None:
            return reply(command, codes.REQUEST_CODE_NOT_SUPPORTED, remark=_unknown(command.code))
        if len(command.body) > self._broker.settings.json_bytes_max:  # no handler of the table takes anything but JSON
            size, limit = len(command.body), self._broker.settings.json_bytes_max
            raise ProtocolError(f"json_bytes_max: the body has {size} bytes, the limit is {limit}")
        return handler(connection, command, values(REQUESTS[command.code], command.fields))


_NESTED = "what was sent is nested too deeply to be read"


def _unknown(code: int) -> str:
    if code == codes.END_TRANSACTION:
        return "transactions are not supported"
    return f"request code {code} is not supported"
