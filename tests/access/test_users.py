"""Users and rules in their file: changes, crashes, disks that fail."""

import resource
import threading
from pathlib import Path

import pytest

from postdate.access.rules import Action, Policy, Rule, User
from postdate.access.users import (
    AUTH_FILE,
    Users,
    make_rule,
    with_changed_user,
    with_rules,
    with_user,
    without_rules,
    without_user,
)
from postdate.errors import NotWritten, UsageError
from postdate.testing import FaultPoints, Killed

ADMIN = User("admin", "secret-of-admin", is_super=True)
ALICE = User("alice", "secret-of-alice")
RULE = make_rule("Topic:orders", ["Pub", "Sub"], ["10.0.0.0/8"])


def opened(folder: Path, **limits: int) -> Users:
    return Users(folder, **limits)


def begun(folder: Path, **limits: int) -> Users:
    users = opened(folder, **limits)
    users.change(with_user(ADMIN))
    users.change(with_user(ALICE))
    return users


def test_a_folder_has_no_users_at_first(tmp_path: Path) -> None:
    assert not opened(tmp_path).all
    assert not list(tmp_path.iterdir())


def test_users_and_rules_are_there_after_a_restart(tmp_path: Path) -> None:
    users = begun(tmp_path)
    users.change(with_rules("alice", [RULE, make_rule("*", ["All"], decision="Deny", policy="Default")]))
    users.change(with_changed_user("alice", is_enabled=False))
    assert opened(tmp_path).all == users.all
    alice = users.all["alice"]
    assert not alice.is_enabled
    assert alice.rules == (
        Rule("Topic:orders", frozenset({Action.PUB, Action.SUB}), True, ("10.0.0.0/8",)),
        Rule("*", frozenset({Action.ALL}), False, (), Policy.DEFAULT),
    )


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    begun(tmp_path)
    assert (tmp_path / AUTH_FILE).stat().st_mode & 0o777 == 0o600


def test_every_change_is_a_new_version(tmp_path: Path) -> None:
    users = begun(tmp_path)
    version = users.version
    users.change(with_changed_user("alice", secret="another-secret"))
    assert users.version > version
    assert users.all["alice"].secret == "another-secret"


def test_a_rule_replaces_those_with_its_pattern_and_policy(tmp_path: Path) -> None:
    users = begun(tmp_path)
    users.change(with_rules("alice", [RULE]))
    users.change(with_rules("alice", [make_rule("Topic:orders", ["Get"]), make_rule("Topic:bills", ["Get"])]))
    assert [(rule.pattern, len(rule.actions)) for rule in users.all["alice"].rules] == [
        ("Topic:orders", 1), ("Topic:bills", 1),
    ]  # fmt: skip
    users.change(without_rules("alice", "topic:orders"))
    assert [rule.pattern for rule in users.all["alice"].rules] == ["Topic:bills"]
    with pytest.raises(UsageError, match="no rule for Topic:orders"):
        users.change(without_rules("alice", "Topic:orders"))
    users.change(without_rules("alice"))
    assert users.all["alice"].rules == ()


def test_a_super_user_always_stays(tmp_path: Path) -> None:
    users = opened(tmp_path)
    with pytest.raises(UsageError, match="one super user must stay"):
        users.change(with_user(ALICE))
    users.change(with_user(ADMIN))
    for change in (
        without_user("admin"), with_changed_user("admin", is_super=False), with_changed_user("admin", is_enabled=False),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="one super user must stay"):
            users.change(change)
    assert opened(tmp_path).all == {"admin": ADMIN}


def test_a_user_that_exists_or_does_not_is_named(tmp_path: Path) -> None:
    users = begun(tmp_path)
    with pytest.raises(UsageError, match="there is a user 'alice' already"):
        users.change(with_user(ALICE))
    for change in (without_user("bob"), with_changed_user("bob", is_super=True), with_rules("bob", [RULE])):
        with pytest.raises(UsageError, match="there is no user 'bob'"):
            users.change(change)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "ä", "x" * 65, "a/b", "pipeline", None, 7])
def test_a_name_that_can_be_none_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(UsageError):
        opened(tmp_path).change(with_user(User(name, "secret-of-x", is_super=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", ["", "short12", "with space", "tab\tsecret", "schlüssel", "x" * 129, None])
def test_a_secret_that_can_be_none_is_refused_and_not_shown(tmp_path: Path, secret: object) -> None:
    with pytest.raises(UsageError, match="8 to 128 printable") as caught:
        opened(tmp_path).change(with_user(User("admin", secret, is_super=True)))  # type: ignore[arg-type]
    assert not secret or str(secret) not in str(caught.value)


def test_users_and_rules_are_bounded(tmp_path: Path) -> None:
    users = begun(tmp_path, users_max=2, rules_max=2)
    with pytest.raises(UsageError, match="users_max: there are 2 users, the limit is 2"):
        users.change(with_user(User("bob", "secret-of-bob")))
    with pytest.raises(UsageError, match="rules_max"):
        users.change(with_rules("alice", [make_rule(f"Topic:{n}", ["Get"]) for n in range(3)]))
    users.change(with_rules("alice", [make_rule(f"Topic:{n}", ["Get"]) for n in range(2)]))


# -- beside a running broker ------------------------------------------------------------------------------------


def test_a_change_of_another_process_is_seen(tmp_path: Path) -> None:
    users = begun(tmp_path)
    assert not users.refresh()
    opened(tmp_path).change(without_user("alice"))
    version = users.version
    assert users.refresh()
    assert (list(users.all), users.version) == (["admin"], version + 1)
    assert not users.refresh()


def test_changes_of_two_processes_are_both_kept(tmp_path: Path) -> None:
    begun(tmp_path)
    several = [opened(tmp_path) for _ in range(4)]

    def add(number: int) -> None:
        for count in range(5):
            several[number].change(with_user(User(f"user-{number}-{count}", "secret-of-many")))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened(tmp_path).all) == 22


def test_a_file_that_is_gone_or_damaged_leaves_the_users_as_they_were(tmp_path: Path) -> None:
    users = begun(tmp_path)
    before = users.all
    (tmp_path / AUTH_FILE).write_text("{")
    with pytest.raises(UsageError, match=r"auth\.json does not hold users"):
        users.refresh()
    assert not users.refresh()  # complained about once
    (tmp_path / AUTH_FILE).unlink()
    with pytest.raises(UsageError, match="is gone"):
        users.refresh()
    assert users.all is before


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "null", '{"format": 2, "users": []}', '{"format": 1, "users": {"a": 1}}',
        '{"format": 1, "users": [{"name": "a"}]}', "\x00",
        '{"format": 1, "users": [{"name": "a", "secret": 7, "type": "Super", "status": "enable"}]}',
        '{"format": 1, "users": [{"name": "a", "secret": "secret-of-a", "type": "Boss", "status": "enable"}]}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_broker_does_not_start_with_a_damaged_file(tmp_path: Path, content: str) -> None:
    (tmp_path / AUTH_FILE).write_text(content)
    with pytest.raises(UsageError, match=r"auth\.json does not hold users"):
        opened(tmp_path)


# -- crashes and full disks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "is_changed"), [("users.written", False), ("users.synced", False), ("users.renamed", True)]
)
def test_a_crash_leaves_the_users_before_or_after_the_change(tmp_path: Path, point: str, is_changed: bool) -> None:
    users = begun(tmp_path)
    with FaultPoints(kill_at=(point, 0)), pytest.raises(Killed):
        users.change(without_user("alice"))
    again = opened(tmp_path)
    assert ("alice" not in again.all) is is_changed
    again.change(with_user(User("bob", "secret-of-bob")))
    assert "bob" in opened(tmp_path).all


def test_a_disk_that_takes_no_more_changes_nothing(tmp_path: Path) -> None:
    users = begun(tmp_path)
    before = (tmp_path / AUTH_FILE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(NotWritten, match="nothing has changed: File too large"):
            users.change(without_user("alice"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "alice" in users.all
    assert (tmp_path / AUTH_FILE).read_bytes() == before
    assert not (tmp_path / f"{AUTH_FILE}.new").exists()
    assert not users.refresh()
    users.change(without_user("alice"))
