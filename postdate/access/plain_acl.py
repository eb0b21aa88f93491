"""Reads plain_acl.yml, the users of RocketMQ 4.x, to take them over once.

An account becomes a user with its access key as name: a super user if it is an admin, else a normal one whose rules say
what its permissions said. Addresses that may do everything without a signature are not taken over.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from postdate.access.rules import Rule, User
from postdate.access.users import check_name, check_secret, make_rule
from postdate.errors import UsageError

_FILE_BYTES_MAX = 8 << 20
# What a permission meant. Everybody could look at topics and groups.
_ACTIONS = {"DENY": (), "PUB": ("Pub", "Get"), "SUB": ("Sub", "Get"), "PUB|SUB": ("Pub", "Sub", "Get")}
_ACTIONS["SUB|PUB"] = _ACTIONS["PUB|SUB"]


class PlainAcl(NamedTuple):
    users: list[User]
    warnings: list[str]  # what was not taken over


def read_plain_acl(path: Path) -> PlainAcl:
    """Raises UsageError."""
    try:
        with path.open("rb") as file:
            plain = yaml.safe_load(file.read(_FILE_BYTES_MAX))
    except OSError as error:
        raise UsageError(f"the file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # its text may show what stands there
        raise UsageError(f"the file {path} is not YAML, expected a plain_acl.yml of RocketMQ 4.x") from error
    accounts = plain.get("accounts") if isinstance(plain, dict) else None
    if not isinstance(accounts, list) or not all(isinstance(each, dict) for each in accounts):
        raise UsageError(f"the file {path} has no list of accounts, expected a plain_acl.yml of RocketMQ 4.x")
    warnings = []
    if plain.get("globalWhiteRemoteAddresses"):
        warnings.append("globalWhiteRemoteAddresses are not taken over: everybody has to sign in")
    users: list[User] = []
    for account in accounts:
        users.append(_read_account(account))
        if account.get("whiteRemoteAddress"):
            warnings.append(f"whiteRemoteAddress of {users[-1].name} is not taken over: everybody has to sign in")
    if len({user.name for user in users}) < len(users):
        raise UsageError(f"the file {path} has an access key twice")
    return PlainAcl(users, warnings)


def _read_account(account: Mapping[str, Any]) -> User:
    name = str(account.get("accessKey"))
    check_name(name)
    secret = account.get("secretKey")
    secret = str(secret) if isinstance(secret, int) else secret  # digits without quotes
    try:
        check_secret(secret)
    except UsageError as error:
        raise UsageError(f"account {name}: {error}") from error
    assert isinstance(secret, str)
    if account.get("admin") in (True, "true"):
        return User(name, secret, is_super=True)
    return User(name, secret, rules=tuple(_read_rules(name, account)))


def _read_rules(name: str, account: Mapping[str, Any]) -> Iterator[Rule]:
    for kind, default, single in (
        ("Topic", "defaultTopicPerm", "topicPerms"), ("Group", "defaultGroupPerm", "groupPerms"),
    ):  # fmt: skip
        actions = _read_permission(name, account.get(default) or "DENY")
        if actions:
            yield make_rule(f"{kind}:*", actions, policy="Default")
        for text in account.get(single) or ():
            resource, sign, permission = str(text).partition("=")
            if not (resource and sign):
                raise UsageError(f"account {name}: {single} has {str(text)[:64]!r}, expected NAME=PERMISSION")
            actions = _read_permission(name, permission)
            decision = ("Allow", actions) if actions else ("Deny", ("All",))
            yield make_rule(f"{kind}:{resource.strip()}", decision[1], decision=decision[0])


def _read_permission(name: str, text: object) -> tuple[str, ...]:
    found = _ACTIONS.get(str(text).replace(" ", "").upper())
    if found is None:
        raise UsageError(f"account {name}: permission {str(text)[:32]!r}, expected DENY, PUB, SUB or PUB|SUB")
    return found
