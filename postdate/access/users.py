"""The users of a broker and their rules, in the file auth.json of its data folder.

    {"format": 1, "users": [{"name", "secret", "type", "status", "rules": [{"resource", "actions", "sources", ...}]}]}

Secrets stand there as they are: whoever checks a signature by HMAC needs the secret itself, so no hash of it would do.
Only the broker's own account can read the file (0600).

A change is read, made, written to a new file, synced and renamed, under a lock that every writer takes: a crash or a
full disk leaves the users as they were before, and a command may change them beside a running broker, which looks at
the file once a second. From the first user on a broker asks everybody who they are, so one enabled super user always
stays.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from postdate.access.rules import (
    Action,
    Policy,
    Rule,
    User,
    parse_action,
    parse_decision,
    parse_pattern,
    parse_policy,
    parse_sources,
)
from postdate.access.token import TOKEN_USER
from postdate.errors import NotWritten, UsageError
from postdate.faultpoint import reach

AUTH_FILE, LOCK_FILE = "auth.json", "auth.lock"
USERS_MAX, RULES_MAX = 1_000, 10_000  # what `Limits` has by default
_FORMAT = 1
OWNER_ONLY = 0o600
FILE_BYTES_MAX = 64 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SECRET = re.compile(r"[!-~]{8,128}")  # printable, without spaces
SUPER, NORMAL = "Super", "Normal"
ENABLED, DISABLED = "enable", "disable"

People = Mapping[str, User]  # by name
Change = Callable[[People], dict[str, User]]
NOBODY: People = MappingProxyType({})


class Users:
    """The users of a data folder. What has changed on the disk is read by `refresh`."""

    def __init__(self, folder: Path, users_max: int = USERS_MAX, rules_max: int = RULES_MAX) -> None:
        """Raises UsageError where the file cannot be read: a broker must not start as if it had no users."""
        self._folder, self._path = folder, folder / AUTH_FILE
        self._users_max, self._rules_max = users_max, rules_max
        self._seen = self._stamp()
        self.all: People = self._read() or {}
        self.version = 1  # grows with every change

    @property
    def are_stale(self) -> bool:
        """Whether the file has changed since it was last read. Raises UsageError where that cannot be seen."""
        return self._stamp() != self._seen

    def refresh(self) -> bool:
        """Reads the file again if it has changed; returns whether it had. Raises UsageError where it cannot be read, or
        is gone: then the users stay as they were.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp  # what cannot be read is complained about once
        found = self._read()
        if found is None:
            raise UsageError(f"{AUTH_FILE} is gone: the users stay as they were until the broker stops")
        self._keep(found)
        return True

    def change(self, change: Change) -> None:
        """Makes a change, durable on return. Raises what the change raises, UsageError where a limit is reached, and
        NotWritten.
        """
        with self._locked():
            before = self._read() or {}
            after = change(before)
            self._check(before, after)
            try:
                self._write(after)
            except OSError as error:
                raise NotWritten(f"the users cannot be written, nothing has changed: {error.strerror}") from error
            self._seen = self._stamp()
            self._keep(after)
            self._sync_folder()

    def _keep(self, found: dict[str, User]) -> None:
        self.all = found
        self.version += 1

    def _check(self, before: People, after: People) -> None:
        if len(after) > max(self._users_max, len(before)):
            raise UsageError(f"users_max: there are {len(before)} users, the limit is {self._users_max}")
        count, earlier = (sum(len(user.rules) for user in users.values()) for users in (after, before))
        if count > max(self._rules_max, earlier):
            raise UsageError(f"rules_max: the users would have {count} rules, the limit is {self._rules_max}")
        if not any(user.is_super and user.is_enabled for user in after.values()):
            raise UsageError(
                "one super user must stay enabled: the first user is a super user, and the last one cannot be "
                "deleted, disabled or made a normal one"
            )

    # -- the file -----------------------------------------------------------------------------------------------

    def _stamp(self) -> tuple[int, int, int] | None:
        """What shows that the file has changed; None where there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{AUTH_FILE} cannot be read: {error.strerror}") from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> dict[str, User] | None:
        """Returns the users in the file; None where there is none. Raises UsageError."""
        try:
            with open(self._path, "rb") as file:
                data = file.read(FILE_BYTES_MAX)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{AUTH_FILE} cannot be read: {error.strerror}") from error
        try:
            plain = orjson.loads(data)
            if plain["format"] != _FORMAT:
                raise UsageError(f"it has format {plain['format']!r:.20}, this program knows {_FORMAT}")
            users = [_read_user(each) for each in plain["users"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__} {error}" if not isinstance(error, UsageError) else str(error)
            raise UsageError(f"{AUTH_FILE} does not hold users: {why}; restore it from a copy") from error
        return {user.name: user for user in users}

    def _write(self, users: People) -> None:
        plain = {"format": _FORMAT, "users": [_plain_user(user) for user in users.values()]}
        data = orjson.dumps(plain, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        made = self._path.with_name(f"{AUTH_FILE}.new")
        try:
            made.unlink(missing_ok=True)
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
                file.write(data)
                file.flush()
                reach("users.written")
                os.fsync(file.fileno())
            reach("users.synced")
            made.rename(self._path)
            reach("users.renamed")
        except OSError:
            with suppress(OSError):
                made.unlink(missing_ok=True)
            raise

    def _sync_folder(self) -> None:
        try:
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise NotWritten(
                f"the users have changed, but after a power loss they may be as before: {error.strerror}"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # here, as Windows has none, and only a broker and its commands write users

        try:
            descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        except OSError as error:
            raise NotWritten(f"the users cannot be written, nothing has changed: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _plain_user(user: User) -> dict[str, Any]:
    return {
        "name": user.name, "secret": user.secret, "type": SUPER if user.is_super else NORMAL,
        "status": ENABLED if user.is_enabled else DISABLED, "rules": [plain_rule(rule) for rule in user.rules],
    }  # fmt: skip


def _read_user(plain: Mapping[str, Any]) -> User:
    rules = tuple(read_rule(each) for each in plain.get("rules", ()))
    check_name(plain["name"])
    check_secret(plain["secret"])
    return User(plain["name"], plain["secret"], read_type(plain["type"]), read_status(plain["status"]), rules)


def plain_rule(rule: Rule) -> dict[str, Any]:
    """Returns a rule as JSON has it."""
    return {
        "resource": rule.pattern, "actions": sorted(action.value for action in rule.actions),
        "sources": list(rule.sources), "decision": "Allow" if rule.is_allowed else "Deny", "policy": rule.policy.value,
    }  # fmt: skip


def read_rule(plain: Mapping[str, Any]) -> Rule:
    """Raises UsageError, KeyError, TypeError."""
    return make_rule(
        plain["resource"], plain["actions"], plain.get("sources") or (), plain["decision"],
        plain.get("policy") or Policy.CUSTOM.value,
    )  # fmt: skip


def make_rule(
    resource: str, actions: Iterable[str], sources: Iterable[str] = (), decision: str = "Allow", policy: str = "Custom"
) -> Rule:
    """Makes a rule of texts. Raises UsageError."""
    done = _parse_actions(tuple(actions))
    if not done:
        raise UsageError(f"a rule for {resource[:64]!r} names no action")
    found = _parse_sources(tuple(sources))
    return Rule(parse_pattern(resource), done, parse_decision(decision), found, parse_policy(policy))


# Rules repeat a few: a file of 10,000 is read in a tenth of the time.


@lru_cache(1_024)
def _parse_actions(texts: tuple[str, ...]) -> frozenset[Action]:
    return frozenset(map(parse_action, texts))


@lru_cache(1_024)
def _parse_sources(texts: tuple[str, ...]) -> tuple[str, ...]:
    return parse_sources(texts)


# -- names and secrets ------------------------------------------------------------------------------------------


def check_name(name: object) -> None:
    """Raises UsageError for what can be no user's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{str(name)[:64]!r} can be no user's name, expected 1 to 64 of a-z A-Z 0-9 . _ @ -, a letter or a digit "
            "first"
        )
    if name == TOKEN_USER:
        raise UsageError(f"{TOKEN_USER!r} is the name of the broker's own processes: choose another")


def check_secret(secret: object) -> None:
    """Raises UsageError, which does not show it, for what can be no secret."""
    if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
        raise UsageError("a secret has 8 to 128 printable characters of ASCII, without spaces")


def read_type(text: object) -> bool:
    """Returns whether a type is that of a super user. Raises UsageError."""
    return _read_word(text, "type", {SUPER: True, NORMAL: False})


def read_status(text: object) -> bool:
    """Returns whether a status means that a user is enabled. Raises UsageError."""
    return _read_word(text, "status", {ENABLED: True, DISABLED: False})


def _read_word(text: object, what: str, known: Mapping[str, bool]) -> bool:
    for word, meaning in known.items():
        if str(text).lower() == word.lower():
            return meaning
    raise UsageError(f"the {what} of a user is {str(text)[:32]!r}, expected {' or '.join(known)}")


# -- changes: given the users, they return the users afterwards -----------------------------------------------------


def with_user(user: User) -> Change:
    """Adds a user."""
    check_name(user.name)
    check_secret(user.secret)

    def change(users: People) -> dict[str, User]:
        if user.name in users:
            raise UsageError(f"there is a user {user.name!r} already")
        return {**users, user.name: user}

    return change


def with_changed_user(
    name: str, *, secret: str | None = None, is_super: bool | None = None, is_enabled: bool | None = None
) -> Change:
    """Changes what is given."""
    if secret is not None:
        check_secret(secret)

    def change(users: People) -> dict[str, User]:
        user = find_user(users, name)
        return {
            **users,
            name: replace(
                user,
                secret=user.secret if secret is None else secret,
                is_super=user.is_super if is_super is None else is_super,
                is_enabled=user.is_enabled if is_enabled is None else is_enabled,
            ),
        }

    return change


def without_user(name: str) -> Change:
    """Removes a user with its rules."""

    def change(users: People) -> dict[str, User]:
        find_user(users, name)
        return {other: user for other, user in users.items() if other != name}

    return change


def with_rules(name: str, rules: Iterable[Rule]) -> Change:
    """Gives a user rules. They replace those with the same pattern and policy."""
    given = tuple(dict.fromkeys(rules))
    replaced = {(rule.policy, rule.pattern) for rule in given}

    def change(users: People) -> dict[str, User]:
        user = find_user(users, name)
        kept = tuple(rule for rule in user.rules if (rule.policy, rule.pattern) not in replaced)
        return {**users, name: replace(user, rules=kept + given)}

    return change


def without_rules(name: str, pattern: str = "", policy: Policy | None = None) -> Change:
    """Takes rules from a user: those of a pattern, of a policy, or all. Raises UsageError where there are none."""
    wanted = parse_pattern(pattern) if pattern else ""

    def change(users: People) -> dict[str, User]:
        user = find_user(users, name)
        kept = tuple(
            rule for rule in user.rules if wanted not in ("", rule.pattern) or policy not in (None, rule.policy)
        )
        if wanted and len(kept) == len(user.rules):
            raise UsageError(f"user {name!r} has no rule for {wanted}")
        return {**users, name: replace(user, rules=kept)}

    return change


def find_user(users: People, name: str) -> User:
    """Raises UsageError."""
    user = users.get(name)
    if user is None:
        raise UsageError(f"there is no user {name[:64]!r}")
    return user
