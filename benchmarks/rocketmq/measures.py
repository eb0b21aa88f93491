"""What is measured: which program with how many messages, in which flush modes, and what is to be reached."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rocketmq.comparison import Goal

SYNC, ASYNC = "sync", "async"
PLAIN_RATE = 1_000  # a second, where latency is measured
COUNT_MIN = 500


class Row(NamedTuple):
    """A line of the table: a figure of the program, or what is made of one."""

    name: str
    figure: str
    unit: str
    goal: Goal | None = None


class Measure(NamedTuple):
    name: str
    flush: str
    arguments: tuple[str, ...]
    rows: tuple[Row, ...]
    messages: int = 1  # by which the server's CPU is divided
    is_usual: bool = True  # whether it is measured when it is not asked for by name


def at_least(ratio: float) -> Goal:
    return Goal(ratio)


def at_most(ratio: float) -> Goal:
    return Goal(ratio, at_most=True)


def within(bound: float) -> Goal:
    return Goal(bound, at_most=True, is_ratio=False)


def measures(scale: float) -> list[Measure]:
    """All of them, in order. A scale below 1 makes counts smaller and leaves the goals."""
    retry = Row("first retry (level 1) of a new group", "again_s", "s", within(1.1))
    return [
        *_sends(SYNC, "timed", scale, at_least(1.3)),
        *_sends(SYNC, "plain", scale, at_least(1.0)),
        *_times(SYNC, scale),
        Measure("retry", SYNC, ("retry", "1"), (retry,)),
        *_sends(ASYNC, "timed", scale, at_least(1.1)),
        # Half an hour more, for those who want to see that the flush mode is not what decides them.
        *(measure._replace(is_usual=False) for measure in _sends(ASYNC, "plain", scale, at_least(1.0))),
        *(measure._replace(is_usual=False) for measure in _times(ASYNC, scale)),
    ]


def _times(flush: str, scale: float) -> list[Measure]:
    return [lateness(flush, scale, 1, 5), _latency(flush, scale), _received(flush, scale), _visible(flush, scale)]


def warming(scale: float) -> list[Measure]:
    """One run of those that take every way through a server. Their figures are thrown away."""
    return [_sends(SYNC, "timed", scale, None)[0], _received(SYNC, scale * 0.2)]


def scaled(count: int, scale: float) -> int:
    return max(int(count * scale), COUNT_MIN)


def _sends(flush: str, kind: str, scale: float, goal: Goal | None) -> list[Measure]:
    """256 in flight, 16 threads, 1 thread. The CPU of a send is told of the first, where a server is busiest."""
    what = "timed sends" if kind == "timed" else "sends without delay"
    found = []
    for threads, title, full in ((0, "256 in flight", 100_000), (16, "16 threads", 40_000), (1, "1 thread", 4_000)):
        count = scaled(full, scale)
        name = f"{what}, {flush} flush, {title}"
        rows = [Row(name, "rate", "msg/s", goal)]
        if threads == 0:
            cpu_goal = at_most(0.4) if kind == "timed" and goal else None
            rows.append(Row(f"server CPU per send of these ({what}, {flush})", "cpu_us", "us", cpu_goal))
        arguments = ("sends", str(count), kind, str(threads))
        found.append(Measure(f"{kind}-{threads or 'async'}", flush, arguments, tuple(rows), count))
    return found


def lateness(flush: str, scale: float, p50_ms: float, p99_ms: float) -> Measure:
    """With the times that are to be reached."""
    count, span_ms = scaled(10_000, scale), max(int(20_000 * scale), 2_000)
    what = f"{count:,} timed over {span_ms / 1_000:g} s at a push consumer, {flush} flush: lateness"
    rows = (
        Row(f"{what}, p50", "p50_ms", "ms", within(p50_ms)),
        Row(f"{what}, p99", "p99_ms", "ms", within(p99_ms)),
        Row(f"{what}, worst", "max_ms", "ms"),
        Row(f"{what}, how many early", "early", "", within(0)),
    )
    return Measure("lateness", flush, ("lateness", str(count), str(span_ms)), rows, count)


def _latency(flush: str, scale: float) -> Measure:
    count = scaled(10_000, scale)
    what = f"without delay, {PLAIN_RATE:,} a second at a push consumer, {flush} flush: latency"
    rows = (Row(f"{what}, p50", "p50_ms", "ms", at_most(1.0)), Row(f"{what}, p99", "p99_ms", "ms", at_most(1.0)))
    return Measure("latency", flush, ("latency", str(count), str(count * 1_000 // PLAIN_RATE)), rows, count)


def _received(flush: str, scale: float) -> Measure:
    count = scaled(100_000, scale)
    name = f"{count:,} due at one instant, {flush} flush: last at a push consumer"
    return Measure("received", flush, ("received", str(count)), (Row(name, "last_s", "s", within(1.0)),), count)


def _visible(flush: str, scale: float) -> Measure:
    count = scaled(1_000_000, scale)
    name = f"{count:,} due at one instant, {flush} flush: all visible"
    return Measure("visible", flush, ("visible", str(count)), (Row(name, "visible_s", "s", within(0.2)),), count)


def names(scale: float = 1.0) -> Sequence[str]:
    """Of the measures, each once, in order."""
    return list(dict.fromkeys(measure.name for measure in measures(scale)))
