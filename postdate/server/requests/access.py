"""Users and rules, as RocketMQ's tools and our command manage them. No answer ever has a password.

Whoever may change the cluster may change users and rules, but only a super user may touch a super user.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from postdate.access.rules import Rule, User, parse_policy
from postdate.access.users import (
    DISABLED,
    ENABLED,
    NORMAL,
    SUPER,
    Change,
    People,
    check_name,
    make_rule,
    plain_rule,
    read_status,
    read_type,
    with_changed_user,
    with_rules,
    with_user,
    without_rules,
    without_user,
)
from postdate.errors import NoPermission, ProtocolError, UsageError
from postdate.server.access import Gate
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.tasks import Tasks
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, reply

_SUBJECT = "User:"  # what tools write before a user's name


class Accesses:
    """Answers requests about users and rules. `changed` is called after each change: it ends what is forbidden now."""

    def __init__(self, gate: Gate, tasks: Tasks, changed: Callable[[], None]) -> None:
        self._gate, self._tasks, self._changed = gate, tasks, changed

    # -- users --------------------------------------------------------------------------------------------------

    def create_user(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        body = bodies.load(command.body, "a user")
        user = User(
            asked["username"], _text(body, "password"), read_type(_text(body, "userType") or NORMAL),
            read_status(_text(body, "userStatus") or ENABLED),
        )  # fmt: skip
        self._change(connection, command, user.name, with_user(user), makes_super=user.is_super)

    def update_user(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Changes what the body names."""
        body = bodies.load(command.body, "a user")
        secret, kind, status = (_text(body, name) for name in ("password", "userType", "userStatus"))
        if not (secret or kind or status):
            raise UsageError("nothing to change: give password, userType or userStatus")
        is_super = read_type(kind) if kind else None
        change = with_changed_user(
            asked["username"], secret=secret or None, is_super=is_super,
            is_enabled=read_status(status) if status else None,
        )  # fmt: skip
        self._change(connection, command, asked["username"], change, makes_super=bool(is_super))

    def delete_user(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        self._change(connection, command, asked["username"], without_user(asked["username"]))

    def get_user(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers a user; nothing where there is none."""
        user = self._gate.users.all.get(asked["username"])
        return reply(command, codes.SUCCESS, body=b"" if user is None else orjson.dumps(_user_info(user)))

    def list_users(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        found = [_user_info(user) for user in self._sorted() if asked["filter"] in user.name]
        return reply(command, codes.SUCCESS, body=orjson.dumps(found))

    # -- rules --------------------------------------------------------------------------------------------------

    def put_rules(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Gives a user rules; they replace those for the same resource."""
        name = _user_of(asked["subject"])
        rules = _read_rules(bodies.load(command.body, "rules"))
        if not rules:
            raise UsageError(f"no rule is given for user {name!r}")
        self._change(connection, command, name, with_rules(name, rules))

    def delete_rules(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Takes the rules for a resource from a user, or all."""
        name = _user_of(asked["subject"])
        policy = parse_policy(asked["policyType"]) if asked["policyType"] else None
        self._change(connection, command, name, without_rules(name, asked["resource"], policy))

    def get_rules(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the rules of a user; nothing where there are none."""
        user = self._gate.users.all.get(_user_of(asked["subject"]))
        body = orjson.dumps(_acl_info(user, user.rules)) if user is not None and user.rules else b""
        return reply(command, codes.SUCCESS, body=body)

    def list_rules(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        found = []
        for user in self._sorted():
            rules = tuple(rule for rule in user.rules if asked["resourceFilter"] in rule.pattern)
            if rules and asked["subjectFilter"] in f"{_SUBJECT}{user.name}":
                found.append(_acl_info(user, rules))
        return reply(command, codes.SUCCESS, body=orjson.dumps(found))

    # -- changing -----------------------------------------------------------------------------------------------

    def _sorted(self) -> list[User]:
        return sorted(self._gate.users.all.values(), key=lambda user: user.name)

    def _change(
        self, connection: Connection, command: Command, name: str, change: Change, *, makes_super: bool = False
    ) -> None:
        """Makes a change on another thread: it waits for the disk."""
        asker, users, request = connection.asker, self._gate.users, command.without_content()

        def change_if_allowed(before: People) -> dict[str, User]:
            touched = before.get(name)
            if makes_super or (touched is not None and touched.is_super):
                _require_super(asker, before)
            return change(before)

        async def answer() -> bytes:
            await asyncio.to_thread(users.change, change_if_allowed)
            self._changed()
            return reply(request, codes.SUCCESS)

        self._tasks.answer(connection, request, answer())


def _require_super(asker: Asker, users: People) -> None:
    """Raises NoPermission. Where there are no users yet, anybody makes the first one."""
    user = users.get(asker.name)
    if users and asker.user is not None and (user is None or not user.is_super or not user.is_enabled):
        raise NoPermission(f"user {asker.name!r} is no super user, and only a super user may touch one")


def _text(body: Mapping[str, Any], name: str) -> str:
    found = body.get(name)
    if found is not None and not isinstance(found, str):
        raise ProtocolError(f"{name} of a user must be a text")
    return found or ""


def _user_of(subject: str) -> str:
    """Returns the user that a subject names: "User:alice". Raises UsageError."""
    kind, colon, name = subject.partition(":")
    if not colon or f"{kind}:".lower() != _SUBJECT.lower():
        raise UsageError(f"the subject {subject[:64]!r} is unknown, expected {_SUBJECT}NAME")
    check_name(name)
    return name


def _read_rules(body: Mapping[str, Any]) -> list[Rule]:
    """Raises ProtocolError for a body of another form, UsageError for a rule that cannot be one."""
    try:
        return [
            make_rule(
                entry["resource"], entry["actions"], entry.get("sourceIps") or (), entry.get("decision") or "Allow",
                policy.get("policyType") or "Custom",
            )
            for policy in body.get("policies") or ()
            for entry in policy.get("entries") or ()
        ]  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"rules that cannot be read: {type(error).__name__} {error}") from error


def _user_info(user: User) -> dict[str, Any]:
    return {
        "username": user.name, "userType": SUPER if user.is_super else NORMAL,
        "userStatus": ENABLED if user.is_enabled else DISABLED,
    }  # fmt: skip


def _acl_info(user: User, rules: tuple[Rule, ...]) -> dict[str, Any]:
    entries: dict[str, list[dict[str, Any]]] = {}
    for rule in rules:
        plain = plain_rule(rule)
        entry = {"resource": plain["resource"], "actions": plain["actions"], "sourceIps": plain["sources"]}
        entries.setdefault(plain["policy"], []).append(entry | {"decision": plain["decision"]})
    policies = [{"policyType": policy, "entries": found} for policy, found in entries.items()]
    return {"subject": f"{_SUBJECT}{user.name}", "policies": policies}
