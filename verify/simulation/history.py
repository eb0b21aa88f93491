"""Makes random histories, runs them, and shortens those that fail."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from verify.simulation.model import Broken
from verify.simulation.site import LIMITS, SETTINGS, with_settings
from verify.simulation.world import Op, World

OPS_PER_HISTORY = 60


class Failure(NamedTuple):
    """A history that breaks a promise, made as short as possible."""

    seed: int
    history: list[Op]
    error: BaseException

    def __str__(self) -> str:
        ops = "\n".join(f"  {op}" for op in self.history)
        return f"seed {self.seed}: {type(self.error).__name__}: {self.error}\nshortest history found:\n{ops}"


def _no_numbers(_: random.Random) -> tuple[int, ...]:
    return ()


# (weight, verb, function that draws its numbers)
_VERBS: list[tuple[float, str, Callable[[random.Random], tuple[int, ...]]]] = [
    (
        16,
        "send",
        lambda d: (d.randrange(7), _amount(d), d.randrange(4), d.randrange(4), d.choice((1, 1, 1, 2, 3, 8, 30))),
    ),
    (2, "resend", lambda d: (d.randrange(1_000),)),
    (5, "send_once", lambda d: (d.randrange(3), d.choice((0, 0, 0, 1)), d.randrange(7), _amount(d), d.randrange(4))),
    (8, "cancel", lambda d: (d.randrange(1_000), d.choice((0, 0, 0, 1, 2, 3, 4)))),
    (4, "move", lambda d: (d.randrange(1_000), d.randrange(4), _amount(d))),
    (1, "begin_move", lambda d: (d.randrange(1_000), d.randrange(4), _amount(d))),
    (1, "end_move", _no_numbers),
    (4, "find", lambda d: (d.randrange(1_000), d.randrange(3))),
    (10, "flush", _no_numbers),
    (14, "pass", lambda d: (d.choice((1, 10, 500, 2_000, 10_000, 40_000)),)),
    (4, "advance", _no_numbers),
    (2, "step", lambda d: (d.choice((-20_000, -3_000, -500, 700, 30_000)),)),
    (2.5, "job", lambda d: (d.randrange(8), d.randrange(6), d.choice((0, 1, 700, 5_000, 9_000, 60_000)))),
    (1, "import", lambda d: (d.randrange(6), 1 + _amount(d), d.randrange(4), d.randrange(2), d.choice((1, 2, 5)))),
    (1.5, "adopt", lambda d: (d.randrange(8),)),
    (0.3, "fail", lambda d: (d.randrange(8),)),
    (2, "commit", lambda d: (d.randrange(2), d.randrange(10))),
    (1, "resize", lambda d: (d.randrange(2), d.randrange(1, 4))),
    (0.4, "delete", lambda d: (d.randrange(2),)),
    (5, "pop", lambda d: (d.randrange(2), d.choice((1, 2, 8, 32)), d.choice((1, 500, 3_000, 20_000, 60_000)))),
    (4, "ack", lambda d: (d.randrange(1_000), d.choice((0, 0, 0, 1)))),
    (2, "change", lambda d: (d.randrange(1_000), d.choice((1, 1_000, 10_000)))),
    (2, "bury", lambda d: (d.randrange(1, 4),)),
    (2, "fail_message", lambda d: (d.randrange(1_000), d.choice((0, 1, 1_000, 10_000)))),
    (1.5, "give_back", lambda d: (d.randrange(1_000),)),
    (
        3,
        "pull",
        lambda d: (d.randrange(2), d.randrange(3), d.choice((1, 3, 8)), d.randrange(256), d.choice((0, 500, 20_000))),
    ),
    (1, "leave_queue", lambda d: (d.randrange(2), d.randrange(3))),
    (2, "register", lambda d: (_which(d),)),
    (0.7, "register_foreign", lambda d: (d.randrange(4),)),
    (4, "read", lambda d: (d.randrange(1, 12), _which(d))),
    (2, "work", lambda d: (d.choice((1, 2, 4, 5, 8, 20)), _which(d))),
    (3, "select", lambda d: (d.choice((1, 1, 2, 3, 4, 4)), _which(d))),
    (0.5, "fail_tries", lambda d: (d.randrange(1, 5), _which(d))),
    (0.3, "leave", lambda d: (_which(d),)),
    (4, "stage", lambda d: (_ahead(d), _which(d))),
    (1, "stage_again", _no_numbers),
    (1.5, "begin_stage", lambda d: (_ahead(d), _which(d))),
    (2, "end_stage", _no_numbers),
    (0.7, "upload", lambda d: (_ahead(d), _which(d))),
    (1, "die", lambda d: (_which(d),)),
    (1.5, "serve", lambda d: (d.randrange(1, 6), _which(d))),
    (2, "bulk", lambda d: (_ahead(d),)),
    (1, "begin_bulk", lambda d: (_ahead(d), d.randrange(4))),
    (1.5, "end_bulk", _no_numbers),
    (1.5, "away", lambda d: (d.randrange(1, 6),)),
    (2, "ask_table", _no_numbers),
    (4, "snapshot", lambda d: (d.randrange(1 << 30),)),
    (3, "retain", _no_numbers),
    (1.5, "close", _no_numbers),
    (2, "kill", _no_numbers),
    (3, "power", lambda d: (d.randrange(1 << 30),)),
    (1.5, "spoil", lambda d: (d.randrange(1 << 30),)),
    (3, "kill_soon", lambda d: (d.randrange(40),)),
    (0.7, "fail_sync", _no_numbers),
    (0.7, "full", lambda d: (d.choice((0, 2_000, 20_000)),)),
    (1.5, "room", _no_numbers),
]


def _amount(dice: random.Random) -> int:
    return dice.choice((0, 1, 2, 100, 1_000, 4_999, 5_000, 5_001, 8_000, 30_000, 100_000, dice.randrange(60_000)))


def _ahead(dice: random.Random) -> int:
    return dice.choice((0, 3_000, 6_000, 20_000))


def _which(dice: random.Random) -> int:
    """One of two pipelines, mostly the first."""
    return dice.choice((0, 0, 0, 1))


# Settings and limits of some seeds, by the seed's last digit.
_VARIANTS = {
    3: (with_settings(flush="async"), LIMITS),
    5: (with_settings(retention_ms=500), LIMITS),
    6: (with_settings(retention_ms=500), LIMITS),
    7: (with_settings(wheel_entries_max=12), LIMITS),
    8: (SETTINGS, replace(LIMITS, rows_by_column=64)),
}


# The last digits of seeds with many jobs, and how much more often verbs are drawn then.
_MANY_JOBS = (4, 9)
_SHARES = {
    "job": 6,
    "import": 3,
    "adopt": 4,
    "work": 6,
    "select": 6,
    "stage": 2,
    "fail_tries": 2,
    "send": 1.5,
    "cancel": 2,
    "pass": 0.4,
    "step": 0.4,
}


# The last digits of seeds with transactions, and their verbs. They have dice of their own, so that the other ops of a
# seed are what they would be without.
_WITH_TRANSACTIONS = (1, 2, 3, 5, 7, 9)
_TRANSACTION_VERBS: list[tuple[float, str, Callable[[random.Random], tuple[int, ...]]]] = [
    (5, "half", lambda d: (d.randrange(7), _amount(d), d.randrange(4), d.randrange(4))),
    (6, "end", lambda d: (d.randrange(1_000), d.choice((0, 0, 0, 1, 2, 3)))),
    (3, "checks", lambda d: (d.randrange(4), d.randrange(2))),
]


def random_history(seed: int) -> list[Op]:
    dice = random.Random(seed)
    shares = _SHARES if seed % 10 in _MANY_JOBS else {}
    weights = [weight * shares.get(verb, 1) for weight, verb, _ in _VERBS]
    chosen = dice.choices(_VERBS, weights, k=dice.randrange(10, 2 * OPS_PER_HISTORY))
    history = [Op(verb, draw(dice)) for _, verb, draw in chosen]
    return _with_transactions(history, random.Random(~seed)) if seed % 10 in _WITH_TRANSACTIONS else history


def _with_transactions(history: list[Op], dice: random.Random) -> list[Op]:
    """Puts ops of producers with transactions between the others."""
    weights = [weight for weight, _, _ in _TRANSACTION_VERBS]
    for _ in range(dice.randrange(5, 5 + len(history) // 3)):
        ((_, verb, draw),) = dice.choices(_TRANSACTION_VERBS, weights)
        history.insert(dice.randrange(len(history) + 1), Op(verb, draw(dice)))
    return history


def run_history(history: list[Op], seed: int = 0) -> None:
    """Raises Broken if the history breaks a promise. Some seeds run with other settings."""
    _run_in(_world_of(seed), history)


def _world_of(seed: int) -> World:
    return World(*_VARIANTS.get(seed % 10, (SETTINGS, LIMITS)))


def _run_in(world: World, history: list[Op]) -> None:
    for op in history:
        world.run(op)
    world.finish()


def digest_seed(seed: int) -> str:
    """The digest of a seed's run; if the run breaks a promise, it ends there."""
    world = _world_of(seed)
    with world.site.digest.suppress(Broken):
        _run_in(world, random_history(seed))
    return world.site.digest.hex()


def run_seed(seed: int) -> Failure | None:
    history = random_history(seed)
    error = _error_of(history, seed)
    if error is None:
        return None
    return _shorten(seed, history, error)


def _error_of(history: list[Op], seed: int) -> BaseException | None:
    try:
        run_history(history, seed)
    except Exception as error:  # any error of a run is a finding
        return error
    return None


def _kind(error: BaseException) -> tuple[type, str]:
    """What must stay the same while a history is shortened: the error, and whether it is a finding of `check`."""
    return type(error), "check" if str(error).startswith("check") else ""


def _shorten(seed: int, history: list[Op], error: BaseException) -> Failure:
    """Leaves out halves, quarters, ... single ops, as long as the failure is of the same kind."""
    size = len(history) // 2
    while size >= 1:
        at = 0
        while at < len(history):
            shorter = history[:at] + history[at + size :]
            found = _error_of(shorter, seed)
            if found is not None and _kind(found) == _kind(error):
                history, error = shorter, found
            else:
                at += size
        size //= 2
    return Failure(seed, history, error)
