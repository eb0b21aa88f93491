"""Users and rules of a broker, as operators and their programs manage them: one function per request.

They raise PostdateError where no broker is reached or it refuses.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from postdate.access.rules import Rule
from postdate.access.users import plain_rule
from postdate.client.admin import ask
from postdate.errors import ProtocolError
from postdate.wire.requests import Request


class UserInfo(NamedTuple):
    """A user, as a broker shows it: without its secret."""

    name: str
    kind: str  # Super or Normal
    status: str  # enable or disable


class RuleInfo(NamedTuple):
    """A rule of a user, as a broker shows it."""

    user: str
    resource: str
    actions: list[str]
    sources: list[str]
    decision: str
    policy: str


def create_user(address: str | None, name: str, secret: str, *, is_super: bool = False) -> None:
    body = {"username": name, "password": secret, "userType": "Super" if is_super else "Normal"}
    ask(address, Request.AUTH_CREATE_USER, {"username": name}, orjson.dumps(body))


def update_user(address: str | None, name: str, secret: str = "", kind: str = "", status: str = "") -> None:
    """Changes what is given."""
    body = {"username": name, "password": secret, "userType": kind, "userStatus": status}
    given = {field: value for field, value in body.items() if value}
    ask(address, Request.AUTH_UPDATE_USER, {"username": name}, orjson.dumps(given))


def delete_user(address: str | None, name: str) -> None:
    ask(address, Request.AUTH_DELETE_USER, {"username": name})


def list_users(address: str | None) -> list[UserInfo]:
    return [_user(each) for each in _rows(ask(address, Request.AUTH_LIST_USERS).body)]


def find_user(address: str | None, name: str) -> UserInfo | None:
    """Returns None where there is no such user."""
    body = ask(address, Request.AUTH_GET_USER, {"username": name}).body
    return _user(orjson.loads(body)) if body else None


def put_rules(address: str | None, user: str, rules: Iterable[Rule]) -> None:
    """Gives a user rules; they replace those for the same resource."""
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for rule in rules:
        plain = plain_rule(rule)
        entry = {"resource": plain["resource"], "actions": plain["actions"], "sourceIps": plain["sources"]}
        by_policy.setdefault(plain["policy"], []).append(entry | {"decision": plain["decision"]})
    policies = [{"policyType": policy, "entries": entries} for policy, entries in by_policy.items()]
    body = orjson.dumps({"subject": f"User:{user}", "policies": policies})
    ask(address, Request.AUTH_CREATE_ACL, {"subject": f"User:{user}"}, body)


def delete_rules(address: str | None, user: str, resource: str = "") -> None:
    """Takes the rules for a resource from a user, or all."""
    fields = {"subject": f"User:{user}"} | ({"resource": resource} if resource else {})
    ask(address, Request.AUTH_DELETE_ACL, fields)


def list_rules(address: str | None, user: str = "") -> list[RuleInfo]:
    """The rules of a user, or of all."""
    fields = {"subjectFilter": f"User:{user}"} if user else {}
    try:
        return [
            RuleInfo(
                name, entry["resource"], entry["actions"], entry["sourceIps"], entry["decision"], policy["policyType"]
            )
            for acl in _rows(ask(address, Request.AUTH_LIST_ACL, fields).body)
            for name in (acl["subject"].removeprefix("User:"),)
            if user in ("", name)
            for policy in acl["policies"]
            for entry in policy["entries"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"rules that cannot be read: {type(error).__name__} {error}") from error


def _rows(body: bytes) -> list[Any]:
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a list of users or rules that cannot be read: {error}") from error
    if not isinstance(found, list):
        raise ProtocolError("a list of users or rules that is none")
    return found


def _user(plain: Any) -> UserInfo:
    try:
        return UserInfo(plain["username"], plain["userType"], plain["userStatus"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"a user that cannot be read: {type(error).__name__} {error}") from error
