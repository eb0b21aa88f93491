"""Assignments: a consumer that does not share out queues itself asks which to read, and how (clientRebalance=false).

Popping, everybody reads all queues; pulling, the queues are shared out as the client's strategy says. They are told to
pop, unless SET_MESSAGE_REQUEST_MODE has asked for pulls. Retry topics, where clients send messages back to, are pulled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.errors import NoPermission, UsageError
from postdate.message import RETRY_TOPIC_PREFIX
from postdate.server.connection import Connection
from postdate.server.requests.auto_creation import Birth
from postdate.server.sessions.members import Members
from postdate.wire import bodies, codes
from postdate.wire.allocation import allocate, allocate_by_circle
from postdate.wire.bodies import Assignment, QueueName
from postdate.wire.frame import Command, reply

POP, PULL = "POP", "PULL"
MODES_SETTING = "messageRequestModes"  # of a group: by topic, as its operator has set it
_ANY_QUEUE = -1

_STRATEGIES = {"AVG": allocate, "AVG_BY_CIRCLE": allocate_by_circle}


class Assignments:
    """Serves one broker."""

    def __init__(self, broker: Broker, clock: Clock, birth: Birth, members: Members[Connection]) -> None:
        self._broker = broker
        self._clock = clock
        self._birth = birth
        self._members = members
        self._name = broker.settings.broker_name

    def query(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_assignment_request(command.body)
        mode = self._mode(request.group, request.topic)
        queue_ids: Sequence[int]
        if request.message_model == "BROADCASTING":
            mode, queue_ids = PULL, self._all_queues(request.topic)
        else:
            queue_ids = [_ANY_QUEUE] if mode == POP else self._queues(request)
        assignments = [Assignment(QueueName(request.topic, self._name, queue_id), mode) for queue_id in queue_ids]
        return reply(command, codes.SUCCESS, body=bodies.encode_assignments(assignments))

    def _mode(self, group: str, topic: str) -> str:
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return PULL
        modes = self._broker.view.group_settings(group).get(MODES_SETTING, {})
        return PULL if modes.get(topic) == PULL else POP

    def _all_queues(self, topic: str) -> Sequence[int]:
        return range(self._birth.promised(topic).read_queue_count)

    def _queues(self, request: bodies.AssignmentRequest) -> Sequence[int]:
        strategy = _STRATEGIES.get(request.strategy)
        if strategy is None:
            known = ", ".join(_STRATEGIES)
            raise UsageError(f"strategy {request.strategy[:100]!r} is not known here, expected one of {known}")
        client_ids = [member.client_id for member in self._members.of(request.group)]
        return strategy(request.client_id, client_ids, self._all_queues(request.topic))

    def set_mode(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_mode_request(command.body)
        if request.topic.startswith(RETRY_TOPIC_PREFIX):
            raise NoPermission(f"topic {request.topic!r} is pulled always: clients send messages back to it")
        if request.mode not in (POP, PULL):
            raise UsageError(f"mode {request.mode[:100]!r}, expected {POP} or {PULL}")
        self._birth.group(request.group)
        settings = dict(self._broker.view.group_settings(request.group))
        modes = settings.get(MODES_SETTING, {}) | {request.topic: request.mode}
        self._broker.put_group(request.group, settings | {MODES_SETTING: modes}, self._clock.now_ms())
        return reply(command, codes.SUCCESS)
