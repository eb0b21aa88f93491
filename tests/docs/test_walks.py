"""The walks of docs/architecture.md: the functions that a request passes, as a trace of the real calls shows them."""

import importlib
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postdate.cli.app import main
from postdate.clock import ManualClock
from postdate.wire.requests import Request
from tests.support.core import HOUR_MS, MINUTE_MS, T0, TOPIC
from tests.support.peer import connected, read_bodies, sent
from tests.support.pipeline import World
from tests.support.server import serving
from tests.support.tracing import Trace
from tests.test_imports import LAYERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# These run in processes or threads that a trace does not follow: Spark's executors, Flight's threads in bulk.
ELSEWHERE = ("postdate/bulk/", "postdate/spark/executor/selecting.py")


class Walk(NamedTuple):
    steps: list[tuple[str, str]]  # file and function
    aside: set[str]  # files that take part, and that the data does not pass
    module_count: int  # as the page says it

    @property
    def modules(self) -> set[str]:
        return {path for path, _ in self.steps}


def read_walk(heading: str) -> Walk:
    """Reads a walk from the page."""
    text = re.split(r"^#+ ", PAGE.partition(f"\n### {heading}\n")[2], flags=re.MULTILINE)[0]
    steps = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", text, flags=re.MULTILINE)
    aside = re.search(r"^On the way also: (.*?)\.$", text, flags=re.MULTILINE | re.DOTALL)
    counted = re.search(r"(\d+) modules", text)
    assert steps, f"the walk {heading!r} has no steps"
    assert counted, f"the walk {heading!r} does not say how many modules it passes"
    return Walk(steps, set(re.findall(r"`([^`]+)`", aside[1])) if aside else set(), int(counted[1]))


def check_walk(walk: Walk, trace: Trace) -> None:
    """Compares a walk with what was called."""
    named = len(walk.modules)
    assert walk.module_count == named, f"the page says {walk.module_count} modules, its table has {named}"
    left = iter(trace.calls)
    for step in walk.steps:
        if step[0].startswith(ELSEWHERE):
            check_there(*step)
        else:
            assert step in left, f"{step} was not called, or not after the steps before it"
    if walk.aside:
        unknown = trace.modules - walk.modules - walk.aside
        assert not unknown, f"modules that the page does not name: {sorted(unknown)}"


def check_there(path: str, function: str) -> None:
    """Finds a function that runs elsewhere."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert callable(reduce(getattr, function.split("."), module))


def test_the_layers_are_those_that_are_held() -> None:
    rows = re.findall(r"^\| \d+ \| (.+) \|$", PAGE, flags=re.MULTILINE)
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(LAYERS)


def test_a_near_send_passes_these_functions(tmp_path: Path) -> None:
    walk = read_walk("A near send")
    trace = Trace(walk.steps)
    with trace.following(), serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "makes topic and group", TIMER_DELAY_MS=1_000)
        served.pass_ms(1_000)
        served.settle()
        read_bodies(peer, "orders")
        with trace.recording():
            sent(peer, "orders", "walks", UNIQ_KEY="K", TIMER_DELAY_MS=10_000)
            served.pass_ms(10_000)
            served.settle()
            assert read_bodies(peer, "orders")[-1] == "walks"
    check_walk(walk, trace)


def test_a_far_send_passes_these_functions(tmp_path: Path) -> None:
    walk = read_walk("A far send")
    trace = Trace(walk.steps)
    with trace.following():
        world = World(tmp_path)
        with connected(world.served) as peer, trace.recording():
            sent(peer, TOPIC, "walks", UNIQ_KEY="K", TIMER_DELAY_MS=10 * MINUTE_MS)
            world.batch()
            world.pass_minutes(12)
            assert read_bodies(peer, TOPIC) == ["walks"]
        world.close()
    check_walk(walk, trace)


def test_a_cancel_passes_these_functions(tmp_path: Path) -> None:
    walk = read_walk("A cancel")
    trace = Trace(walk.steps)
    with trace.following(), serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", UNIQ_KEY="K", TIMER_DELAY_MS=10_000).fields["recallHandle"]
        with trace.recording():
            answer = peer.ask(Request.RECALL_MESSAGE, producerGroup="p", topic="orders", recallHandle=handle)
        assert answer.fields["outcome"] == "cancelled"
    check_walk(walk, trace)


def run_command(words: Sequence[str]) -> None:
    assert main(words) == 0


def test_a_cancel_by_predicate_passes_these_functions(tmp_path: Path, spark: Any) -> None:
    walk = read_walk("cancel --where")
    trace = Trace(walk.steps)
    with trace.following():
        world = World(tmp_path, spark=spark)
        world.send("order", [world.clock.now_ms() + HOUR_MS + n for n in range(3)])
        world.batch()
        with trace.recording():
            run_command(["cancel", "--where", "topic = 'orders'", "--addr", world.served.address, "--no-wait"])
            world.batch()
        world.close()
    check_walk(walk, trace)


def test_a_step_that_is_not_called_is_noticed() -> None:
    hash_key, read_clock = ("postdate/keys.py", "key_hash"), ("postdate/clock.py", "now")
    trace = Trace([])
    trace.calls, trace.modules = [hash_key, read_clock], {"postdate/keys.py", "postdate/clock.py"}
    check_walk(Walk([hash_key, read_clock], set(), 2), trace)
    for steps in ([("postdate/keys.py", "gone")], [read_clock, hash_key]):
        with pytest.raises(AssertionError, match="was not called"):
            check_walk(Walk(steps, set(), len(steps)), trace)
    with pytest.raises(AssertionError, match="does not name"):
        check_walk(Walk([hash_key], {"postdate/errors.py"}, 1), trace)
    with pytest.raises(AssertionError, match="says 3 modules"):
        check_walk(Walk([hash_key], set(), 3), trace)
