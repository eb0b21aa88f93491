"""Who may do what: users, their rules, and one function that decides.

A rule allows or denies actions on the resources that its pattern names, perhaps only from some addresses. Of the rules
of a user the most exact pattern that fits counts; rules of the policy Custom come before those of Default:

    Topic:orders    one topic           (likewise Group: and Cluster:)
    Topic:ord*      topics whose names begin so; a longer beginning is more exact
    Topic:*         all topics
    *               everything

Where two rules with the same pattern disagree, the one that denies wins. What no rule names is denied. A super user may
do everything, a disabled one nothing. The names and the order are those of RocketMQ's ACL 2.0.
"""

import enum
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from postdate.errors import UsageError

ANY = "*"
PATTERN_CHARACTERS_MAX = 300  # a kind and the longest name of a topic or a group, with room
SOURCES_MAX = 64  # of one rule: each is compared for each new decision
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Action(enum.Enum):
    """What a user does with a resource. ALL stands in rules alone."""

    ALL = "All"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


class ResourceKind(enum.Enum):
    TOPIC = "Topic"
    GROUP = "Group"
    CLUSTER = "Cluster"


class Policy(enum.Enum):
    """Rules of DEFAULT count only where none of CUSTOM fits."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


class Resource(NamedTuple):
    """One topic, group or cluster."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}"


class Rule(NamedTuple):
    """One rule of a user. No sources means from everywhere."""

    pattern: str
    actions: frozenset[Action]
    is_allowed: bool = True
    sources: tuple[str, ...] = ()
    policy: Policy = Policy.CUSTOM

    def fits(self, action: Action, address: str) -> bool:
        """Whether the rule speaks about an action that comes from an IP address."""
        if action not in self.actions and Action.ALL not in self.actions:
            return False
        return not self.sources or _is_among(address, self.sources)


@dataclass(frozen=True)
class User:
    """A user, its secret and its rules."""

    name: str
    secret: str = field(repr=False)  # no secret reaches a log or a traceback
    is_super: bool = False
    is_enabled: bool = True
    rules: tuple[Rule, ...] = ()

    @cached_property
    def _by_pattern(self) -> dict[tuple[Policy, str], list[Rule]]:
        found: dict[tuple[Policy, str], list[Rule]] = {}
        for rule in self.rules:
            found.setdefault((rule.policy, rule.pattern), []).append(rule)
        return found

    @cached_property
    def _beginnings(self) -> list[int]:
        """The lengths of the names that patterns with a star begin with, the longest first."""
        starred = (rule.pattern for rule in self.rules if rule.pattern.endswith(ANY) and rule.pattern != ANY)
        return sorted({len(pattern.partition(":")[2]) - len(ANY) for pattern in starred}, reverse=True)

    def rules_for(self, resource: Resource, policy: Policy) -> Iterable[list[Rule]]:
        """Yields the rules of each pattern that names a resource, the most exact one first."""
        kind, name, rules = resource.kind.value, resource.name, self._by_pattern
        patterns = [f"{kind}:{name}"]
        patterns += [f"{kind}:{name[:length]}{ANY}" for length in self._beginnings if length <= len(name)]
        for pattern in (*patterns, ANY):
            found = rules.get((policy, pattern))
            if found:
                yield found


def decide(user: User, resource: Resource, actions: Iterable[Action], address: str) -> bool:
    """Returns whether a user may do at least one of some actions with a resource, from an IP address."""
    if not user.is_enabled:
        return False
    return user.is_super or any(_decide_one(user, resource, action, address) for action in actions)


def _decide_one(user: User, resource: Resource, action: Action, address: str) -> bool:
    for policy in Policy:
        for rules in user.rules_for(resource, policy):
            fitting = [rule.is_allowed for rule in rules if rule.fits(action, address)]
            if fitting:
                return all(fitting)
    return False


# -- from text --------------------------------------------------------------------------------------------------

_KINDS = {kind.value.lower(): kind.value for kind in ResourceKind}
_POLICIES = {policy.value.lower(): policy for policy in Policy}


def parse_pattern(text: str) -> str:
    """Returns the pattern of a rule as it is kept: "topic:ord*" becomes "Topic:ord*". Raises UsageError."""
    stripped = text.strip()
    if stripped == ANY:
        return ANY
    kind, colon, name = stripped.partition(":")
    known = _KINDS.get(kind.lower(), "")
    beginning = name.removesuffix(ANY)
    is_plain = ANY not in beginning and beginning.isprintable() and " " not in beginning
    if not colon or not known or not name or not is_plain or len(stripped) > PATTERN_CHARACTERS_MAX:
        raise UsageError(
            f"the resource {text[:64]!r} of a rule cannot be read, expected Topic:NAME, Group:NAME or Cluster:NAME, "
            "where NAME may end with *, or * alone"
        )
    return f"{known}:{name}"


def parse_action(text: str) -> Action:
    """Raises UsageError."""
    found = next((action for action in Action if action.value.lower() == text.strip().lower()), None)
    if found is None:
        raise UsageError(
            f"there is no action {text[:32]!r}, expected one of {', '.join(each.value for each in Action)}"
        )
    return found


def parse_sources(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns addresses and networks as they are kept. Raises UsageError."""
    found: list[str] = []
    for text in texts:
        try:
            network = ipaddress.ip_network(text.strip())
        except ValueError as error:
            raise UsageError(
                f"the source {text[:64]!r} of a rule is no address, expected one such as 10.0.0.7 or 10.0.0.0/8"
            ) from error
        found.append(str(network) if network.num_addresses > 1 else str(network.network_address))
    if len(found) > SOURCES_MAX:
        raise UsageError(f"a rule has {len(found)} source addresses, the limit is {SOURCES_MAX}: write a network")
    return tuple(dict.fromkeys(found))


def parse_decision(text: str) -> bool:
    """Returns whether a rule allows. Raises UsageError."""
    known = {"allow": True, "deny": False}
    if text.strip().lower() not in known:
        raise UsageError(f"the decision of a rule is {text[:32]!r}, expected Allow or Deny")
    return known[text.strip().lower()]


def parse_policy(text: str) -> Policy:
    """Raises UsageError."""
    found = _POLICIES.get(text.strip().lower())
    if found is None:
        raise UsageError(f"the policy of a rule is {text[:32]!r}, expected Custom or Default")
    return found


def _is_among(address: str, sources: tuple[str, ...]) -> bool:
    found: _Address = ipaddress.ip_address(address)
    # A socket of both families shows an IPv4 client as ::ffff:10.0.0.7.
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found.version == each.version and found in each for each in map(_network, sources))


@lru_cache(4_096)
def _network(text: str) -> _Network:
    return ipaddress.ip_network(text)
