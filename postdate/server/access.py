"""The gate: who sends a request, and whether they may.

Without users nobody is asked. From the first user on every request must be signed, but for those that are open, and its
row in wire/requests.py says what it needs. What only the broker's own processes may ask needs the token of its data
folder in either case, and comes on the broker port.

Every request is checked anew; what a connection was allowed before is remembered with the version of the users, so a
change of users holds for the next request. Signatures are compared in constant time, and every mistake with one gets
the same answer.
"""

import asyncio
import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from postdate import contract
from postdate.access.rules import Action, ResourceKind, Rule, User
from postdate.access.token import TOKEN_USER
from postdate.access.users import Users
from postdate.broker.broker import Broker
from postdate.errors import IllegalMessage, NoPermission, PostdateError, ProtocolError, UsageError
from postdate.server.asker import ANYBODY, Asker
from postdate.server.audit import Audit
from postdate.server.connection import Connection
from postdate.server.lines import Lines
from postdate.server.peer import Peer
from postdate.wire.frame import Command
from postdate.wire.requests import REQUESTS, Request, SignedSend
from postdate.wire.rights import INTERNAL_ALONE, PUBLISH, Asked, RightKind
from postdate.wire.signature import ACCESS_KEY, SECURITY_TOKEN, CallCredentials, SigningKey

UNSIGNED = (
    "the request is not signed by a user who may sign in here: check access key and secret key, and whether the user "
    "is enabled"
)
# What clients of other languages, and old ones, add without signing it, or leave out of what they sign.
_UNSIGNED_FIELDS = (SECURITY_TOKEN, "_UNIQUE_KEY_QUERY", "__ZONE_NAME", "__ZONE_MODE")
_REMEMBERED_CHARACTERS_MAX = 512  # names longer than these are decided about each time
_DETAIL_CHARACTERS_MAX = 500
_JOB_FIELDS = ("call", "op", "id", "topic", "by_ms", "where")  # of a job, that say what it does
_NAMED = {"access": ("username", "subject", "resource"), "values": ("namespace", "key")}  # fields, by handler
_SENDS = frozenset(request for request in Request if request.handler == "send.collect")
# What is looked at also where there are no users.
_ALWAYS = frozenset(
    request
    for request in Request
    if request.right.kind is RightKind.INTERNAL or request.right.is_change or request == Request.JOB
)
# What the pipeline may ask besides what is internal.
_PIPELINE_RULES = (Rule(f"{ResourceKind.CLUSTER.value}:*", frozenset({Action.GET})),)
_PIPELINE_REQUESTS = frozenset({Request.JOB, Request.GET_BULK_TOPIC})
_NOBODY = User("nobody", "a secret that nobody has, for requests of nobody")


class Gate:
    """Decides about the requests of one server. `users` is None, and the token empty, where nothing is asked."""

    def __init__(self, broker: Broker, lines: Lines, users: Users | None, token: str, audit: Audit | None) -> None:
        self._broker, self._lines, self._users, self._token, self._audit = broker, lines, users, token, audit
        self._cluster = broker.settings.cluster_name
        self._pipeline = User(TOKEN_USER, token, rules=_PIPELINE_RULES)
        self._keys: dict[str, SigningKey] = {}
        self._version = 0  # of the users whose keys these are

    @property
    def users(self) -> Users:
        """Raises UsageError where the server keeps no users."""
        if self._users is None:
            raise UsageError("this broker keeps no users")
        return self._users

    @property
    def is_open(self) -> bool:
        """Whether there are no users, so that nobody is asked."""
        return self._users is None or not self._users.all

    @property
    def version(self) -> int:
        """Changes with the users."""
        return 0 if self._users is None else self._users.version

    async def refresh(self) -> None:
        """Reads users that another process has changed, on another thread: many take a tenth of a second. Called once a
        second.
        """
        try:
            if self._users is not None and self._users.are_stale:
                await asyncio.to_thread(self._users.refresh)
        except UsageError as error:
            self._lines.write_seldom("users", str(error))

    def asks(self, command: Command) -> bool:
        """Returns whether a request must be admitted before it is handled."""
        if command.is_response:
            return False
        return not self.is_open or (command.code in _ALWAYS and bool(self._token or self._audit))

    # -- admitting ----------------------------------------------------------------------------------------------

    def admit(self, connection: Connection, command: Command) -> None:
        """Lets a request in, and notes on its connection who sent it. Raises NoPermission, and ProtocolError where it
        cannot be read.
        """
        connection.asker = ANYBODY
        request = REQUESTS.get(command.code)
        if request is None or request.right.kind is RightKind.OPEN:
            return
        self._refuse_large(request, command)
        asked: list[Asked] = []
        try:
            if not self.is_open:
                connection.asker = connection.proven or self._authenticate(connection, command)
                key = self._memory_key(connection.asker, request, command)
                if key is not None and connection.admitted.get(key) == self.version:
                    return
                asked = self._read_needs(request, command)
                self._authorize(connection, request, asked)
                if key is not None:
                    self._remember(connection, key)
            else:
                with suppress(ProtocolError):  # its handler says so better
                    asked = self._read_needs(request, command)
                if self._token and _is_internal(request, asked):
                    connection.asker = self._authenticate(connection, command)
                    self._authorize(connection, request, asked)
        except NoPermission as error:
            self._note_refusal(connection, request, command, asked, error)
            raise
        if self._audit is not None and (request.right.is_change or any(each.is_change for each in asked)):
            self._watch(connection, request, command, asked)

    def admits_send(self, connection: Connection, send: SignedSend) -> bool:
        """Returns whether a usual send may go on. Where it may not, `admit` says why."""
        users, name = self._users, send.fields.get(ACCESS_KEY)
        if users is None or type(name) is not str or len(send.body) > self._broker.settings.body_bytes_max:
            return False
        # Where nobody has the name, a signature is checked all the same: time must not tell which names exist.
        user = users.all.get(name, _NOBODY)
        if not self._key(user).is_signed(send.fields, send.body) or user is _NOBODY or not user.is_enabled:
            return False
        topic = send.header.fields.topic
        if connection.admitted.get((name, topic)) == users.version:
            return True
        asker = self._asker(connection, user)
        if not all(asker.may(need.asked(topic)) for need in PUBLISH.needs):
            return False
        if len(topic) <= _REMEMBERED_CHARACTERS_MAX:
            self._remember(connection, (name, topic))
        return True

    def _refuse_large(self, request: Request, command: Command) -> None:
        """Raises for a body that its handler would refuse: checking its signature would keep all others waiting."""
        size, limit = len(command.body), self._broker.limits.json_bytes_max
        if request in _SENDS:
            if size > self._broker.settings.body_bytes_max:
                limit = self._broker.settings.body_bytes_max
                raise IllegalMessage(f"body_bytes_max: the body has {size} bytes, the limit is {limit}")
        elif size > limit:
            raise ProtocolError(f"json_bytes_max: the body has {size} bytes, the limit is {limit}")

    # -- who is it ----------------------------------------------------------------------------------------------

    def _authenticate(self, connection: Connection, command: Command) -> Asker:
        """Returns who has signed a request. Raises NoPermission, with the same sentence for every mistake."""
        name = command.fields.get(ACCESS_KEY) or ""
        if not name and connection.certificate_name:
            user = self._find_user(connection.certificate_name)
            if user is None or not user.is_enabled:
                raise NoPermission(UNSIGNED)
            return self._asker(connection, user)
        if name == TOKEN_USER and self._token:
            user = self._pipeline
        else:
            # Where nobody has the name, a signature is checked all the same: time must not tell which names exist.
            user = (self._find_user(name) if type(name) is str else None) or _NOBODY
        if not self._is_signed(user, command.fields, command.body) or user is _NOBODY or not user.is_enabled:
            raise NoPermission(UNSIGNED)
        return self._asker(connection, user)

    def prove(self, connection: Peer, credentials: CallCredentials | None) -> Asker:
        """Returns who has signed a call of a protocol that signs beside the request. Raises NoPermission."""
        if self.is_open:
            return ANYBODY
        if credentials is None:
            user = self._find_user(connection.certificate_name) if connection.certificate_name else None
            if user is None or not user.is_enabled:
                raise self._refuse_call(connection, "")
            return self._asker(connection, user)
        # Where nobody has the name, a signature is checked all the same: time must not tell which names exist.
        user = self._find_user(credentials.access_key) or _NOBODY
        if not self._key(user).has_signed(credentials) or user is _NOBODY or not user.is_enabled:
            raise self._refuse_call(connection, credentials.access_key)
        return self._asker(connection, user)

    def _refuse_call(self, connection: Peer, named: str) -> NoPermission:
        name, address = named[:64], _address(connection)
        self._lines.write_seldom(
            ("refused", name, address), f"a call of {name!r} from {address} is refused: {UNSIGNED}"
        )
        if self._audit is not None:
            self._audit.note_refusal(name, address, "CALL", "", UNSIGNED)
        return NoPermission(UNSIGNED)

    def _is_signed(self, user: User, fields: Mapping[str, Any], body: bytes) -> bool:
        key = self._key(user)
        if key.is_signed(fields, body):
            return True
        if not any(name in fields for name in _UNSIGNED_FIELDS):
            return False
        return key.is_signed({name: fields[name] for name in fields if name not in _UNSIGNED_FIELDS}, body)

    def _key(self, user: User) -> SigningKey:
        if self._version != self.version:
            self._keys, self._version = {}, self.version
        found = self._keys.get(user.secret)
        if found is None:
            found = self._keys[user.secret] = SigningKey(user.secret)
        return found

    def _find_user(self, name: str) -> User | None:
        return None if self._users is None else self._users.all.get(name)

    def _asker(self, connection: Peer, user: User) -> Asker:
        return Asker(user, _address(connection), self._cluster, self._find_user, is_internal=user is self._pipeline)

    # -- may they -----------------------------------------------------------------------------------------------

    def _read_needs(self, request: Request, command: Command) -> list[Asked]:
        """Returns what a request needs, as its fields and its body say. Raises ProtocolError."""
        right, needs = request.right, []
        for need in right.needs:
            name = request.read_name(need.field, command.fields) if need.field else ""
            if name or not need.field:  # a field that may be missing: its handler lists what may be seen
                needs.append(need.asked(name))
        if right.body is not None:
            needs += right.body(command.body)
        return needs

    def _authorize(self, connection: Connection, request: Request, asked: list[Asked]) -> None:
        """Raises NoPermission. The token is good on the broker port alone, and for what is internal nothing else is."""
        asker, is_internal = connection.asker, _is_internal(request, asked)
        if asker.is_internal and not connection.is_broker_port:
            raise NoPermission(f"{request.name}: {asker.explain(INTERNAL_ALONE)}")
        if is_internal and not asker.is_internal:
            raise NoPermission(f"{request.name}: {asker.explain(INTERNAL_ALONE)}")
        if is_internal or (asker.is_internal and request in _PIPELINE_REQUESTS):
            return
        for each in asked:
            asker.require(each)

    def _memory_key(self, asker: Asker, request: Request, command: Command) -> Any | None:
        """Returns what a decision is remembered by; None where it is not: where the body says more, or the audit log
        wants to know each time.
        """
        right = request.right
        if right.body is not None or right.is_change or not right.needs:
            return None
        names = [request.read_name(need.field, command.fields) for need in right.needs if need.field]
        if sum(map(len, names)) > _REMEMBERED_CHARACTERS_MAX:
            return None
        return (asker.name, int(request), *names)

    def _remember(self, connection: Connection, key: Any) -> None:
        if len(connection.admitted) >= self._broker.limits.admitted_max:
            connection.admitted.clear()
        connection.admitted[key] = self.version

    # -- what is written down -----------------------------------------------------------------------------------

    def _note_refusal(
        self, connection: Connection, request: Request, command: Command, asked: list[Asked], error: PostdateError
    ) -> None:
        named = connection.asker.name or command.fields.get(ACCESS_KEY)
        name, address = named[:64] if type(named) is str else "", _address(connection)
        self._lines.write_seldom(
            ("refused", name, address), f"{request.name} of {name!r} from {address} is refused: {error}"
        )
        if self._audit is not None:
            self._audit.note_refusal(name, address, request.name, _names(asked), str(error))

    def _watch(self, connection: Connection, request: Request, command: Command, asked: list[Asked]) -> None:
        """Writes a line about a request that changes something, when its answer is known."""
        assert self._audit is not None
        line = self._audit.begin(connection.asker.name, _address(connection), request.name, _names(asked))
        detail = _describe(request, command)
        if detail:
            line["detail"] = detail[:_DETAIL_CHARACTERS_MAX]
        end = partial(self._audit.end, line)
        if command.is_oneway:
            end(None)
        else:
            connection.watch(command.opaque, end)


def _is_internal(request: Request, asked: list[Asked]) -> bool:
    return request.right.kind is RightKind.INTERNAL or any(each.is_internal for each in asked)


def _address(connection: Peer) -> str:
    if not connection.address:
        connection.address = str(ipaddress.ip_address(connection.host.address))
    return connection.address


def _describe(request: Request, command: Command) -> str:
    """Returns what a change of the cluster is about. Passwords stand in bodies that are not shown."""
    if request in (Request.UPDATE_BROKER_CONFIG, Request.UPDATE_NAMESRV_CONFIG):
        return " ".join(command.body.decode(errors="replace").split())
    if request == Request.JOB:
        plain = contract.load(command.body, "a request about jobs")  # it was read before
        return " ".join(f"{name}={plain[name]}" for name in _JOB_FIELDS if plain.get(name))
    if request == Request.RESOLVE_TRANSACTION:
        return " ".join(f"{name}={command.fields.get(name)}" for name in ("id", "commit"))
    fields = _NAMED.get(request.handler.partition(".")[0], ())
    return " ".join(str(command.fields[name]) for name in fields if command.fields.get(name))


def _names(asked: list[Asked]) -> str:
    return ", ".join(str(each.resource).rstrip(":") for each in asked)
