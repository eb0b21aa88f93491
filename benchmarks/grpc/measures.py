"""What is measured over gRPC: of both systems with RocketMQ's client, of Postdate alone with raw connections."""

from benchmarks.rocketmq.comparison import Goal
from benchmarks.rocketmq.measures import SYNC, Measure, Row, at_least, at_most, lateness, scaled, within

IN_FLIGHT = 64  # GrpcClient.java has the same
SEND_COUNT, RAW_COUNT, IDLE_COUNT, IDLE_COUNT_MIN = 50_000, 50_000, 1_000, 20
POLLING_S, POLLING_S_MIN = 20.0, 1.0
RAW, IDLE = "raw", "idle"


def measures(scale: float) -> list[Measure]:
    """Of both systems, in order. A scale below 1 makes counts smaller and leaves the goals."""
    return [_sends(scale, at_least(1.5), at_most(0.5)), lateness(SYNC, scale, 3, 15)]


def warming(scale: float) -> list[Measure]:
    """One run of those that take every way through a server. Their figures are thrown away."""
    return [_sends(scale, None, None), lateness(SYNC, scale * 0.2, 3, 15)]


def _sends(scale: float, rate_goal: Goal | None, cpu_goal: Goal | None) -> Measure:
    count = scaled(SEND_COUNT, scale)
    rows = (
        Row(f"delayed sends, sync flush, {IN_FLIGHT} in flight", "rate", "msg/s", rate_goal),
        Row("server CPU per send of these", "cpu_us", "us", cpu_goal),
    )
    return Measure("sends", SYNC, ("sends", str(count)), rows, count)


def raw_rows() -> tuple[Row, Row]:
    """A rate, and the server's CPU."""
    name = f"delayed sends over one raw connection, sync flush, {IN_FLIGHT} in flight"
    return Row(name, "rate", "msg/s"), Row("server CPU per send of these (raw connection)", "cpu_us", "us")


def idle_rows(count: int, polling_s: float) -> tuple[Row, Row]:
    """Memory that a server grew by, and its share of a core."""
    what = f"{count:,} idle raw connections, each with one ReceiveMessage of {polling_s:g} s"
    return (
        Row(f"{what}: memory (VmRSS) grown by", "grown_mb", "MB", within(30)),
        Row(f"{what}: CPU", "cpu_percent", "% of a core", within(2)),
    )


def idle_size(scale: float) -> tuple[int, float]:
    """How many connections, and how long each of them waits for a message."""
    return max(int(IDLE_COUNT * scale), IDLE_COUNT_MIN), max(POLLING_S * scale, POLLING_S_MIN)


def names() -> list[str]:
    return [*(measure.name for measure in measures(1.0)), RAW, IDLE]
