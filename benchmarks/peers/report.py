"""The page on all systems: tables with medians, who is better, and plots."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import plot
from benchmarks.peers.figures import BY_KEY, FIGURES, LESS, Figure, Measured, Results, is_better, of_work
from benchmarks.peers.plan import WORKS
from benchmarks.peers.registry import OURS
from benchmarks.peers.system import BODY_BYTES
from benchmarks.report import shown

MARK = "\\*"  # marks a system that has notes below the table
HEADLINES = (
    "a_p50", "a_p99", "b_last", "b_visible", "c_durable", "c_volatile", "d_ram", "d_disk", "e_send", "e_delivery",
    "f_rate", "g_burst_server",
)  # fmt: skip
SHORT = {
    "a_p50": "p50 {:.3g} ms", "a_p99": "p99 {:.3g} ms", "b_last": "burst {:.3g} s", "c_durable": "{:,.0f} sends/s",
    "d_ram": "{:.0f} B of RAM", "e_send": "restart {:.3g} s", "f_rate": "{:,.0f} cancels/s",
}  # fmt: skip


# What our own client is to reach. A byte per message is what a process of this kind grows by in any case.
GOALS = {"a_p50": 1.0, "a_p99": 5.0, "b_last": 0.3, "b_visible": 0.2, "d_ram": 1.0}


class Plot(NamedTuple):
    name: str
    work: str
    title: str
    unit: str
    series: dict[str, str]  # by key of the figure


PLOTS = (
    Plot("lateness", "a", "How late a message is in the consumer's hands", "ms", {"a_p50": "p50", "a_p99": "p99"}),
    Plot("burst", "b", "{burst_count:,} due at one instant: until the last is received", "s", {"b_last": "last"}),
    Plot(
        "sends", "c", "Timed sends (more is better)", "messages a second",
        {"c_durable": "durable", "c_volatile": "not durable"},
    ),
    Plot(
        "memory", "d", "RAM of the server per waiting message", "bytes",
        {"d_ram": "due in an hour", "d_near_ram": "due within a minute"},
    ),
    Plot(
        "restart", "e", "After kill -9, until a send and a delivery", "s",
        {"e_send": "first send acknowledged", "e_delivery": "first due message received"},
    ),
    Plot(
        "cpu", "g", "CPU for sending and receiving one message of a burst", "us",
        {"g_burst_server": "server", "g_burst_client": "client"},
    ),
)  # fmt: skip
HOW = {
    "a": "{spread_count:,} messages fall due evenly over {spread_s:g} s; the client sends all of them before the first "
    "is due. There is one consumer. Lateness runs from the due time until the client has the message. A message is out "
    "of order if it comes after one that was due later.",
    "b": "{burst_count:,} messages are due at one instant; the client sends all of them before. The time runs from "
    "that instant until the client has the first and the last. A second run has {million:,}, if a system takes that "
    "many within {send_limit_s:g} s, or within {patient_limit_s:g} s in the first round. Systems that show the ends of "
    "their queues also give the time until all are visible, before a consumer begins; their last receipt includes "
    "that time.",
    "c": "The rate of acknowledged sends that wait for an hour, by each system's quickest way from one client. "
    "Durable: up to {million:,} messages; not durable: {volatile_count:,}. Both words differ from system to system: "
    "see [the systems](#the-systems).",
    "d": "The growth of the server's processes (PSS, so that shared pages count once) during up to {million:,} sends "
    "with bodies of 224 bytes, divided by the number of messages. RAM is memory that the kernel cannot drop; mapped "
    "files have a column of their own. A JVM that touched its heap at start does not grow inside it: compare the "
    "whole, too. Disk is the growth of the data folder, after a sync.",
    "e": "All server processes get SIGKILL while these messages wait, and one more that is due by the time of the "
    "restart. The time runs from the start of the first process until the server acknowledges a send, and until the "
    "client receives that message. A Java client connects within that time; its JVM runs before.",
    "f": "One client cancels {cancel_count:,} messages from all over the waiting ones, as many at once as suits it "
    "best. Then the truth, with {truth_count} messages of each kind: does a message come whose cancel was confirmed? "
    'Does the cancel of a delivered message, or of one that never existed, get "cancelled"? 0 is the truth everywhere.',
    "g": "User and system time from the first send to the last receipt, divided by the messages, in the works a "
    "(including the server's work while it waits) and b. Server: all its processes. Client: the process that sends and "
    "receives.",
}


def write(results: Results, page: Path) -> None:
    """The page and, beside it, its plots."""
    images = page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    drawn = dict(_drawn(results))
    for name, svg in drawn.items():
        (images / f"peers-{name}.svg").write_text(svg)
    page.write_text(markdown(results, set(drawn)))


def in_short(measured: Measured) -> str:
    """Returns the figures of the last round in one line, for the operator of a run."""
    if measured.not_run:
        return f"not run: {measured.not_run}"
    told = ", ".join(text.format(measured.values[key][-1]) for key, text in SHORT.items() if measured.values.get(key))
    return told or "; ".join(sentence for notes in measured.notes.values() for sentence in notes) or "nothing measured"


# -- the page -----------------------------------------------------------------------------------------------------


def markdown(results: Results, plots: set[str]) -> str:
    parts = [*_opening(results), *_verdicts(results), *_goals(results)]
    for work in WORKS:
        parts += _section(results, work, plots)
    return "\n".join([*parts, *_systems(results), ""])


def _opening(results: Results) -> Iterator[str]:
    about = results.about
    plan, rounds = about["plan"], about["rounds"]
    yield "# Beside other systems"
    yield ""
    yield "Systems that people would choose instead do the same work on one machine. This command writes the page:"
    yield ""
    yield "```console"
    yield "$ python -m benchmarks.peers"
    yield "```"
    yield ""
    if about["quick"]:
        yield "**A quick run with small counts: it shows that all works, its figures say nothing.**"
        yield ""
    counts = {each.round_count for each in results.systems.values() if not each.not_run}
    if counts and min(counts) < rounds:
        had = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
        yield f"**Not every system was measured in every round: of {rounds} they had {had}.**"
        yield ""
    yield (
        f"{about['date'][:10]}: {about['cores']} cores of {about['cpu']}, {about['memory_gb']} GB, {about['system']}, "
        f"Python {about['python']}. {_number(rounds, 'round')}, the systems in turn; medians, with the smallest and "
        "the largest. Servers, client and kernel share the cores, over loopback; no other system runs meanwhile. "
        f"Bodies of {BODY_BYTES} bytes. Limits: {plan['send_limit_s']:g} s for sends, {plan['receive_limit_s']:g} s "
        "to receive. `scripts/peers` installs missing systems, then runs the command."
    )
    yield ""


def _verdicts(results: Results) -> Iterator[str]:
    """Postdate's better client against the best of the others, figure by figure."""
    rows = [row for key in HEADLINES if (row := _verdict(results, BY_KEY[key]))]
    yield "## Who is better"
    yield ""
    if rows:
        yield from _table(("figure", "Postdate", "best of the others", "better"), rows)
        yield ""
    lost = [sentence for figure in FIGURES if figure.better and (sentence := _lost(results, figure))]
    if lost:
        yield "Others are better than the better of Postdate's two clients in these figures:"
        yield ""
        yield from lost
    elif rows:
        yield "No other system has a better median in any figure of this page."
    else:
        yield "Postdate and others were not measured together."
    yield ""


def _verdict(results: Results, figure: Figure) -> tuple[str, ...] | None:
    ours, theirs = _best(results, figure, True), _best(results, figure, False)
    if ours is None or theirs is None:
        return None
    if ours[1] == theirs[1]:
        better = "equal"
    else:
        name = "Postdate" if is_better(figure, ours[1], theirs[1]) else f"**{theirs[0].name}**"
        low, high = sorted(max(value, 0.0) for value in (ours[1], theirs[1]))
        better = f"{name}, {shown(high / low)}x" if low > 0 else name
    title = f"{figure.work}, {_title(figure, results)}"
    return title, _told(ours, figure), _told(theirs, figure), better


def _lost(results: Results, figure: Figure) -> str:
    ours = _best(results, figure, True)
    if ours is None:
        return ""
    medians = _medians(results, figure, False)
    better = [each for each in medians if is_better(figure, each[1], ours[1])]
    if not better:
        return ""
    told = "; ".join(
        f"{_told((measured, value), figure)}{_overlap(measured, ours[0], figure)}"
        for measured, value in sorted(better, key=lambda each: each[1], reverse=figure.better != LESS)
    )
    return f"- {figure.work}, {_title(figure, results)}: {told}. {_told(ours, figure)}"


def _overlap(one: Measured, other: Measured, figure: Figure) -> str:
    first, second = one.values[figure.key], other.values[figure.key]
    overlap = min(first) <= max(second) and min(second) <= max(first)
    return ", their ranges overlap" if overlap and len(first) > 1 else ""


def _medians(results: Results, figure: Figure, ours: bool) -> list[tuple[Measured, float]]:
    every = ((slug, measured, measured.median(figure.key)) for slug, measured in results.ran().items())
    return [(measured, value) for slug, measured, value in every if value is not None and (slug in OURS) == ours]


def _best(results: Results, figure: Figure, ours: bool) -> tuple[Measured, float] | None:
    found = _medians(results, figure, ours)
    best = min if figure.better == LESS else max
    return best(found, key=lambda each: each[1]) if found else None


def _told(found: tuple[Measured, float], figure: Figure) -> str:
    return f"{found[0].name}: {shown(found[1])} {figure.unit}".rstrip()


def _goals(results: Results) -> Iterator[str]:
    """Of a whole run: small counts reach goals that are not theirs."""
    measured = results.systems.get(OURS[0])
    if measured is None or results.about["quick"]:
        return
    rows = []
    for key, at_most in GOALS.items():
        figure, median = BY_KEY[key], measured.median(key)
        if median is not None:
            met = "yes" if median <= at_most else "no"
            goal = f"<= {shown(at_most)} {figure.unit}"
            rows.append((_title(figure, results), goal, f"{shown(median)} {figure.unit}", met))
    if rows:
        yield f"Goals of {measured.name}:"
        yield ""
        yield from _table(("figure", "goal", "measured", "met"), rows)
        yield ""


# -- one work -----------------------------------------------------------------------------------------------------


def _section(results: Results, work: str, plots: set[str]) -> Iterator[str]:
    ran = results.ran()
    figures = of_work(work, ran.values())
    if not figures:
        return
    asked = [measured for measured in ran.values() if work in measured.works]
    yield f"## {work}. {WORKS[work][0].upper()}{WORKS[work][1:]}"
    yield ""
    yield HOW[work].format(**_counts(results))
    yield ""
    for drawn in PLOTS:
        if drawn.work == work and drawn.name in plots:
            yield f"![{drawn.title.format(**_counts(results))}](images/peers-{drawn.name}.svg)"
            yield ""
    heads = ["system", *(_head(figure, results) for figure in figures)]
    notes = {measured.name: _notes(measured, figures) for measured in asked}
    rows = [
        [f"{each.name}{MARK if notes[each.name] else ''}", *(_cell(each, figure, asked) for figure in figures)]
        for each in asked
    ]
    yield from _table(heads, rows)
    yield ""
    lines = [f"- {name}: {sentence}" for name, sentences in notes.items() for sentence in sentences]
    if others := [measured.name for measured in ran.values() if work not in measured.works]:
        lines.append(f"- Not measured: {', '.join(others)}")
    if lines:
        yield from lines
        yield ""


def _head(figure: Figure, results: Results) -> str:
    unit = f" ({figure.unit})" if figure.unit else ""
    return f"{_title(figure, results)}{unit}"


def _cell(measured: Measured, figure: Figure, asked: Sequence[Measured]) -> str:
    """The median and the range; the best of a column in bold, unless all are alike."""
    values, median = measured.values.get(figure.key), measured.median(figure.key)
    if not values or median is None:
        return "-"
    medians = [value for each in asked if (value := each.median(figure.key)) is not None]
    is_best = figure.better and len(set(medians)) > 1 and not any(is_better(figure, each, median) for each in medians)
    text = f"**{shown(median)}**" if is_best else shown(median)
    return text if min(values) == max(values) else f"{text} ({shown(min(values))} - {shown(max(values))})"


def _notes(measured: Measured, figures: Sequence[Figure]) -> list[str]:
    """Returns the notes on a system's figures, or why it has none."""
    steps = dict.fromkeys([figure.step for figure in figures] + ["start", "turn"])
    return list(dict.fromkeys(_flat(sentence) for step in steps for sentence in measured.notes.get(step, ())))


def _title(figure: Figure, results: Results) -> str:
    return figure.title.format(**_counts(results))


def _counts(results: Results) -> dict[str, Any]:
    plan = results.about["plan"]
    return {**plan, "spread_s": plan["spread_ms"] / 1_000}


# -- the systems --------------------------------------------------------------------------------------------------


def _systems(results: Results) -> Iterator[str]:
    yield "## The systems"
    yield ""
    yield "Each system has its best reasonable settings. The table says what an acknowledged send survives:"
    yield ""
    ran = results.ran().values()
    heads = ("system", "versions", "durable", "not durable", "settings")
    rows = [
        (each.name, _versions(each), _flat(each.durable), _flat(each.volatile), _flat(each.settings)) for each in ran
    ]
    yield from _table(heads, rows)
    for measured in results.systems.values():
        if measured.not_run:
            yield ""
            yield f"Not run: {measured.name}: {_flat(measured.not_run)}"


def _versions(measured: Measured) -> str:
    return ", ".join(f"{name} {version}" for name, version in measured.versions.items())


def _flat(text: str) -> str:
    """On one line, and without what Markdown would take for something else."""
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# -- plots --------------------------------------------------------------------------------------------------------


def _drawn(results: Results) -> Iterator[tuple[str, str]]:
    for drawn in PLOTS:
        rows = [
            plot.Row(measured.name, [measured.median(key) for key in drawn.series], slug in OURS)
            for slug, measured in results.ran().items()
        ]
        if any(value is not None for row in rows for value in row.values):
            title = drawn.title.format(**_counts(results))
            yield drawn.name, plot.bars(title, drawn.unit, list(drawn.series.values()), rows)
