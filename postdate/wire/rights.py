"""What a request needs: the column `right` of the requests in requests.py.

OPEN        everybody may ask it, also who is not signed in
INTERNAL    the broker's own processes alone: bulk and the pipeline
RULED       users that a rule allows, and super users

A right names resources, each with actions of which one is enough. They stand in fields of the request or, for some, in
its body, which a function below reads. Where neither tells what a message belongs to, as with an offset of the log, the
handler asks when it has read it; `also` says so in words. A retry or dead letter topic belongs to its group: reading it
and sending to it are what the group's consumers do.
"""

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

from postdate import contract
from postdate.access.rules import Action, Resource, ResourceKind
from postdate.errors import ProtocolError
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX
from postdate.wire import bodies
from postdate.wire.frame import plain_text

PUB, SUB, CREATE, UPDATE = Action.PUB, Action.SUB, Action.CREATE, Action.UPDATE
DELETE, GET = Action.DELETE, Action.GET
TOPIC, GROUP, CLUSTER = ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.CLUSTER


class RightKind(enum.Enum):
    OPEN = "open"
    INTERNAL = "internal"
    RULED = "ruled"


class Asked(NamedTuple):
    """One thing that a request needs: one of some actions with a resource. A cluster has no name here: it is the
    broker's own. `is_internal`: the broker's own processes alone.
    """

    resource: Resource
    actions: tuple[Action, ...]
    is_internal: bool = False
    is_change: bool = False  # whether it changes something for good, where the row cannot say so


class Need(NamedTuple):
    """A resource that a field of the request names, and the actions of which one is enough. Without a field it is the
    cluster.
    """

    kind: ResourceKind
    field: str
    actions: tuple[Action, ...]

    def asked(self, name: str) -> Asked:
        """Returns what a request needs whose field has this value."""
        if self.kind is TOPIC:
            return ask_topic(name, *self.actions)
        return Asked(Resource(self.kind, name), self.actions)


INTERNAL_ALONE = Asked(Resource(CLUSTER, ""), (), is_internal=True)

ReadBody = Callable[[bytes], Iterator[Asked]]


class Right(NamedTuple):
    """What a request needs. `is_change`: it changes something for good, so it is written to the audit log."""

    kind: RightKind
    needs: tuple[Need, ...] = ()
    body: ReadBody | None = None  # reads what else it needs
    also: str = ""  # what its handler looks at, in words
    is_change: bool = False

    def __str__(self) -> str:
        if self.kind is not RightKind.RULED:
            return str(self.kind.value)
        named = [
            f"{need.kind.value} {' or '.join(action.value for action in need.actions)}"
            + (f" ({need.field})" if need.field else "")
            for need in self.needs
        ]
        return ", ".join([*named, *([self.also] if self.also else [])])


def ruled(*needs: Need, body: ReadBody | None = None, also: str = "", is_change: bool = False) -> Right:
    return Right(RightKind.RULED, needs, body, also, is_change)


def of_topic(*actions: Action, field: str = "topic") -> Need:
    return Need(TOPIC, field, actions)


def of_group(*actions: Action, field: str = "consumerGroup") -> Need:
    return Need(GROUP, field, actions)


def of_cluster(*actions: Action) -> Need:
    return Need(CLUSTER, "", actions)


def ask_topic(name: str, *actions: Action) -> Asked:
    """Returns what it takes to do something with a topic."""
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        if name.startswith(prefix):
            as_group = tuple(SUB if action is PUB else action for action in actions)
            return Asked(Resource(GROUP, name.removeprefix(prefix)), as_group)
    return Asked(Resource(TOPIC, name), actions)


def ask_group(name: str, *actions: Action) -> Asked:
    return Asked(Resource(GROUP, name), actions)


def ask_cluster(*actions: Action) -> Asked:
    return Asked(Resource(CLUSTER, ""), actions)


# -- bodies -----------------------------------------------------------------------------------------------------
#
# Each reads a body as its handler does, and raises ProtocolError likewise.


def of_heartbeat(body: bytes) -> Iterator[Asked]:
    """Who reads for a group must be allowed to, each topic that it reads as well. Producers need nothing here."""
    for consumer in bodies.decode_heartbeat(body).consumers:
        yield ask_group(consumer.group, SUB)
        for subscription in consumer.subscriptions:
            yield ask_topic(subscription.topic, SUB)


def of_lock(body: bytes) -> Iterator[Asked]:
    yield ask_group(bodies.decode_lock(body).group, SUB)


def of_assignment(body: bytes) -> Iterator[Asked]:
    request = bodies.decode_assignment_request(body)
    yield ask_group(request.group, SUB)
    yield ask_topic(request.topic, SUB)


def of_mode(body: bytes) -> Iterator[Asked]:
    yield ask_group(bodies.decode_mode_request(body).group, UPDATE)


def of_group_settings(body: bytes) -> Iterator[Asked]:
    yield ask_group(_text(body, "a group's settings", "groupName"), CREATE, UPDATE)


def of_dead_letters(body: bytes) -> Iterator[Asked]:
    yield ask_group(_text(body, "dead letters", "group"), SUB, UPDATE)


def of_batch_ack(body: bytes) -> Iterator[Asked]:
    values = bodies.load(body, "a batch of acknowledgements").get("acks") or ()
    try:
        places = {(plain_text(each["c"]), plain_text(each["t"])) for each in values}
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a batch of acknowledgements that cannot be read: {error}") from error
    for group, topic in places:
        yield ask_group(group, SUB)
        yield ask_topic(topic, SUB)


# The calls of JOB: those by which the pipeline selects, decides and follows, those that only look, and those that
# change something. The others tell how far a job is.
PIPELINE_CALLS = frozenset({"decide", "try", "stumble", "leave", "again", "command"})
LOOKING_CALLS = frozenset({"find", "list"})
CHANGING_CALLS = frozenset({"begin", "ask", "adopt", "fail"})


def of_job(body: bytes) -> Iterator[Asked]:
    call = contract.Fields(contract.load(body, "a request about jobs"), "a request about jobs").text("call")
    if call in PIPELINE_CALLS:
        yield ask_cluster(UPDATE)._replace(is_internal=True)
    else:
        actions = (GET,) if call in LOOKING_CALLS else (UPDATE,)
        yield ask_cluster(*actions)._replace(is_change=call in CHANGING_CALLS)


def _text(body: bytes, what: str, name: str) -> str:
    found = bodies.load(body, what).get(name)
    if not isinstance(found, str):
        raise ProtocolError(f"the body of {what} needs the text {name}")
    return found


# -- what the requests need ---------------------------------------------------------------------------------------

OPEN = Right(RightKind.OPEN)
INTERNAL = Right(RightKind.INTERNAL)

PUBLISH = ruled(of_topic(PUB))
END_TRANSACTION = ruled(also="Topic Pub, of the transaction's message")
READ_QUEUE = ruled(of_group(SUB), of_topic(SUB))
READ_OFFSET = ruled(of_group(SUB, GET), of_topic(SUB, GET))
WRITE_OFFSET = ruled(of_group(SUB, UPDATE), of_topic(SUB, UPDATE))
HEARTBEAT = ruled(body=of_heartbeat, also="Group Sub and Topic Sub, of each subscription")
JOIN_GROUP = ruled(of_group(SUB))
LIST_MEMBERS = ruled(of_group(SUB, GET))
LOCK = ruled(body=of_lock, also="Group Sub")
ASSIGN = ruled(body=of_assignment, also="Group Sub, Topic Sub")
ACKNOWLEDGE_BATCH = ruled(body=of_batch_ack, also="Group Sub and Topic Sub, of each message")
SEND_BACK = ruled(of_group(SUB, field="group"), also="Topic Sub, of the message")
SIGNED_IN = ruled(also="nothing but a user")
SUBSCRIBE = ruled(of_topic(SUB))
VIEW_MESSAGE = ruled(also="Topic Sub, of the message")
LOOK_AT_TOPIC = ruled(of_topic(SUB, GET))
GET_TOPIC = ruled(of_topic(GET))
KNOW_TOPIC = ruled(of_topic(PUB, SUB, GET))
LIST_TOPICS = ruled(also="lists topics with Topic Get")
COUNT_TOPICS = ruled(of_topic(GET), also="counts topics with Topic Get")
LIST_READERS = ruled(of_topic(GET), also="lists groups with Group Get")
PUT_TOPIC = ruled(of_topic(CREATE), is_change=True)
DELETE_TOPIC = ruled(of_topic(DELETE), is_change=True)
FORGET_TOPIC = ruled(of_topic(DELETE))
GET_GROUP = ruled(of_group(GET))
LIST_GROUPS = ruled(also="lists groups with Group Get")
PUT_GROUP = ruled(body=of_group_settings, also="Group Create or Update", is_change=True)
SET_MODE = ruled(body=of_mode, also="Group Update", is_change=True)
DELETE_GROUP = ruled(of_group(DELETE, field="groupName"), is_change=True)
RESET_OFFSETS = ruled(of_group(UPDATE, field="group"), of_topic(UPDATE), is_change=True)
CONSUME_DIRECTLY = ruled(of_group(UPDATE), also="Topic Sub, of the message", is_change=True)
FINISH_LETTERS = ruled(body=of_dead_letters, also="Group Sub or Update", is_change=True)
LOOK_AT_CLUSTER = ruled(of_cluster(GET))
READ_BULK_TOPIC = ruled(of_topic(SUB), also="Cluster Get without a topic")
CHANGE_CLUSTER = ruled(of_cluster(UPDATE), is_change=True)
DELETE_VALUE = ruled(also="Cluster Update where there is a value", is_change=True)
JOB = ruled(body=of_job, also="Cluster Get to look, Cluster Update to change; internal to decide and follow")
