"""Rules: which one counts, and what they are made of."""

import random

import pytest

from postdate.access.rules import (
    Action,
    Policy,
    Resource,
    ResourceKind,
    Rule,
    User,
    decide,
    parse_action,
    parse_pattern,
    parse_sources,
)
from postdate.errors import UsageError

ORDERS = Resource(ResourceKind.TOPIC, "orders")
HOME = "10.0.0.7"
PUB, SUB, GET, ALL = Action.PUB, Action.SUB, Action.GET, Action.ALL


def allow(pattern: str, *actions: Action, sources: tuple[str, ...] = (), policy: Policy = Policy.CUSTOM) -> Rule:
    return Rule(pattern, frozenset(actions or (ALL,)), True, sources, policy)


def deny(pattern: str, *actions: Action, sources: tuple[str, ...] = (), policy: Policy = Policy.CUSTOM) -> Rule:
    return allow(pattern, *actions, sources=sources, policy=policy)._replace(is_allowed=False)


def may(*rules: Rule, resource: Resource = ORDERS, actions: tuple[Action, ...] = (PUB,), address: str = HOME) -> bool:
    return decide(User("alice", "secret-of-alice", rules=rules), resource, actions, address)


def test_what_no_rule_names_is_denied() -> None:
    assert not may()
    assert not may(allow("Topic:others"))
    assert not may(allow("Group:orders"))
    assert not may(allow("Topic:orders", SUB))


@pytest.mark.parametrize("pattern", ["Topic:orders", "Topic:ord*", "Topic:*", "Topic:orders*", "*"])
def test_a_pattern_names_what_it_says(pattern: str) -> None:
    assert may(allow(pattern, PUB))
    assert not may(allow(pattern, SUB))
    assert may(allow(pattern, ALL))


def test_a_beginning_does_not_name_what_begins_otherwise() -> None:
    assert not may(allow("Topic:orders-*"))
    assert not may(allow("Topic:rders*"))


@pytest.mark.parametrize(
    ("exact", "wider"),
    [
        ("Topic:orders", "Topic:orders*"), ("Topic:orders*", "Topic:ord*"), ("Topic:ord*", "Topic:o*"),
        ("Topic:o*", "Topic:*"), ("Topic:*", "*"),
    ],
)  # fmt: skip
def test_the_most_exact_pattern_counts(exact: str, wider: str) -> None:
    assert may(allow(exact), deny(wider))
    assert not may(deny(exact), allow(wider))
    assert not may(allow(wider), deny(exact))


def test_an_exact_rule_about_another_action_does_not_count() -> None:
    assert may(deny("Topic:orders", SUB), allow("Topic:*", PUB))


def test_deny_wins_on_a_tie() -> None:
    assert not may(allow("Topic:orders"), deny("Topic:orders"))
    assert not may(deny("Topic:orders", PUB), allow("Topic:orders", ALL))


def test_custom_comes_before_default_however_wide_it_is() -> None:
    assert not may(deny("*"), allow("Topic:orders", policy=Policy.DEFAULT))
    assert may(allow("*"), deny("Topic:orders", policy=Policy.DEFAULT))
    assert may(deny("Topic:others"), allow("Topic:orders", policy=Policy.DEFAULT))


def test_one_of_the_needed_actions_is_enough() -> None:
    assert may(allow("Topic:orders", GET), actions=(PUB, SUB, GET))
    assert may(allow("Topic:orders", GET), deny("Topic:orders", PUB), actions=(PUB, GET))
    assert not may(allow("Topic:orders", GET), actions=(PUB, SUB))


@pytest.mark.parametrize(
    ("source", "address", "fits"),
    [
        ("10.0.0.7", "10.0.0.7", True), ("10.0.0.7", "10.0.0.8", False), ("10.0.0.0/8", "10.9.9.9", True),
        ("10.0.0.0/8", "11.0.0.1", False), ("10.0.0.0/8", "::ffff:10.0.0.1", True), ("::1", "::1", True),
        ("fd00::/8", "fd12::1", True), ("fd00::/8", "10.0.0.7", False), ("0.0.0.0/0", "::1", False),
    ],
)  # fmt: skip
def test_a_rule_may_be_for_some_addresses(source: str, address: str, fits: bool) -> None:
    sources = parse_sources([source])
    assert may(allow("Topic:orders", sources=sources), address=address) is fits
    assert may(allow("Topic:*"), deny("Topic:orders", sources=sources), address=address) is not fits


def test_a_super_user_may_do_everything_and_a_disabled_one_nothing() -> None:
    boss = User("boss", "secret-of-boss", is_super=True, rules=(deny("*"),))
    assert decide(boss, ORDERS, (PUB,), HOME)
    disabled = User("boss", "secret-of-boss", is_super=True, is_enabled=False)
    assert not decide(disabled, ORDERS, (PUB,), HOME)
    assert not decide(User("a", "secret-of-a", is_enabled=False, rules=(allow("*"),)), ORDERS, (PUB,), HOME)


def test_a_user_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(User("alice", "hidden-secret"))


# -- against an obvious model ---------------------------------------------------------------------------------------


def rank(pattern: str, resource: Resource) -> int | None:
    """How exact a pattern is for a resource; None where it does not name it."""
    if pattern == "*":
        return -1
    kind, _, name = pattern.partition(":")
    if kind != resource.kind.value:
        return None
    if name.endswith("*"):
        return len(name) - 1 if resource.name.startswith(name[:-1]) else None
    return 1_000 if name == resource.name else None


def model(rules: list[Rule], resource: Resource, action: Action) -> bool:
    for policy in (Policy.CUSTOM, Policy.DEFAULT):
        found = [
            (place, rule.is_allowed)
            for rule in rules
            if rule.policy is policy
            and (action in rule.actions or ALL in rule.actions)
            and (place := rank(rule.pattern, resource)) is not None
        ]
        if found:
            best = max(place for place, _ in found)
            return all(allowed for place, allowed in found if place == best)
    return False


@pytest.mark.parametrize("seed", range(20))
def test_decisions_are_those_of_a_model_that_looks_at_all_rules(seed: int) -> None:
    dice = random.Random(seed)
    patterns = [
        "*",
        *(f"{kind}:{name}" for kind in ("Topic", "Group") for name in ("a", "ab", "a*", "ab*", "abc*", "*")),
    ]
    for _ in range(100):
        rules = [
            Rule(
                dice.choice(patterns), frozenset(dice.sample([PUB, SUB, GET, ALL], dice.randint(1, 2))),
                dice.random() < 0.6, (), dice.choice(list(Policy)),
            )
            for _ in range(dice.randint(0, 6))
        ]  # fmt: skip
        user = User("u", "secret-of-u", rules=tuple(rules))
        for kind in (ResourceKind.TOPIC, ResourceKind.GROUP):
            for name in ("", "a", "ab", "abcd", "b"):
                resource = Resource(kind, name)
                for action in (PUB, SUB, GET):
                    assert decide(user, resource, (action,), HOME) is model(rules, resource, action), (rules, resource)


# -- from text --------------------------------------------------------------------------------------------------


def test_patterns_are_read_leniently_and_kept_in_one_form() -> None:
    assert parse_pattern(" topic:Orders ") == "Topic:Orders"
    assert parse_pattern("CLUSTER:*") == "Cluster:*"
    assert parse_pattern("*") == "*"


@pytest.mark.parametrize(
    "text", ["", "orders", "Topic:", "Queue:a", "Topic:a*b", "Topic:**", "Topic:a b", "a:*", "Topic:" + "x" * 300]
)
def test_a_pattern_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected Topic:NAME"):
        parse_pattern(text)


def test_actions_and_sources_that_cannot_be_read_are_refused() -> None:
    assert parse_action("pub") is PUB
    with pytest.raises(UsageError, match="expected one of All, Pub"):
        parse_action("write")
    assert parse_sources(["10.0.0.7/32", "10.0.0.7", "10.0.0.0/8"]) == ("10.0.0.7", "10.0.0.0/8")
    for text in ("10.0.0.1/8", "10.0.*", "host"):
        with pytest.raises(UsageError, match="is no address"):
            parse_sources([text])
    with pytest.raises(UsageError, match="the limit is 64"):
        parse_sources([f"10.0.0.{number}" for number in range(65)])
