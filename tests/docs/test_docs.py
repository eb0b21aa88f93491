"""The pages: every example is run, every table is compared with the code, every link leads somewhere.

A page is read line by line for fenced blocks, tables and headings. What each block means:

    python     run, all blocks of a page one after another; `print(...)  # text` must print that text
    console    `$ ` lines are run, in the folder that the page's examples have made; the lines behind one are its
               output. Long ones (NOT_RUN) need only be there. `# exit 1` behind a command: it ends with that code, and
               what it complains about is output too.
    sh         the same without `$ ` and without output
    java       equal to a file of tests/interop/java/src or tests/interop/grpc/java/src, or to its lines between
               `// begin NAME` and `// end NAME`; scripts/interop compiles and runs that file
    json       must be JSON
    toml       must be a file of settings, or one of credentials
    text       a picture

In what is printed a line `...` stands for any number of lines, and `...` within a line for any text: ids and times
differ from run to run. In a command, `...` is the text that it stood for last. The pages of SERVED have a broker, whose
address is in POSTDATE_ADDR and whose data is in ./postdate-data; `postdate check` stops it first, so check comes last.
`postdate up` is a broker of its own: it has free ports, which are shown as the usual ones, and is told to stop when it
listens.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import postdate
from postdate import client
from postdate.access.token import TOKEN_FILE
from postdate.broker.broker import Broker
from postdate.broker.jobs import require_job
from postdate.broker.leasing import FailedMessage, LeaseHandle, PopRequest
from postdate.broker.moving import Source
from postdate.bulk.schema import IN, OF_TOPIC, OUT
from postdate.cli import app
from postdate.cli import command as cli_command
from postdate.client import admin, errors
from postdate.client.address import ADDRESS_DEFAULT
from postdate.client.security import find_login
from postdate.clock import SystemClock
from postdate.config import FIELDS, GROUPS, LIMITS, LIVE, ROCKETMQ_NAMES, Limits, Settings, load
from postdate.contract import Selection, Stage
from postdate.errors import PostdateError
from postdate.message import MovedFrom
from postdate.server import answers
from postdate.spark.formats import topic
from postdate.spark.pending.predicate import CONCAT_MAX, FUNCTIONS, NODES_MAX
from postdate.spark.pipeline import batch, driver, history
from postdate.storage import record as records
from postdate.storage import selection, snapshot
from postdate.storage.batch import KIND_NAMES
from postdate.storage.folder import FIXED_SETTINGS, FORMAT
from postdate.storage.layout import SELECTED
from postdate.storage.rows import BLOCK_ROWS
from postdate.table import keys, merging, slices
from postdate.table.format import CHECKPOINT, HISTORY, MESSAGES, ROW_GROUP_ROWS, SCHEMA
from postdate.wire import bodies, frame, ids
from postdate.wire import codes as wire_codes
from postdate.wire.requests import REQUESTS, Field, Request
from tests.support.bulk import bulking, wait_until
from tests.support.core import (
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    message,
    registered,
    send,
    settled,
    stage,
    write_chunk,
)
from tests.support.handles import recall_handle
from tests.support.pipeline import BEGIN, World
from tests.support.server import Served, serving
from verify.faults.process import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
(
    LIMITS_PAGE,
    FORMATS,
    SETTINGS,
    PROTOCOL,
    CLIENT,
    CLI,
    MQADMIN,
    COMPATIBILITY,
    BULK,
    PIPELINE,
    READERS,
    IMPORT,
    STREAMS,
    FUTURE,
    OPERATIONS,
) = (
    ROOT / "docs" / f"{name}.md"
    for name in (
        "limits",
        "formats",
        "settings",
        "protocol",
        "client",
        "cli",
        "mqadmin",
        "compatibility",
        "bulk",
        "pipeline",
        "readers",
        "import",
        "streams",
        "future",
        "operations",
    )
)
SERVED = {ROOT / "README.md", CLIENT, CLI, OPERATIONS}
INTEROP = ROOT / "tests" / "interop"
JAVA = (INTEROP / "java" / "src", INTEROP / "grpc" / "java" / "src")  # with what runs it: java.py, grpc_java.py
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# Named in the pages and made later.
NOT_YET = {"tests/formats"}
# They run this test, make the environment that it runs in, take minutes, or are run by scripts/interop.
NOT_RUN = ("scripts/", "source ", "python -m benchmarks.", "mvn ", "java ")


KINDS = ("python", "console", "sh", "java", "json", "toml", "text")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# -- reading a page ---------------------------------------------------------------------------------------------


class Block(NamedTuple):
    kind: str
    line: int  # of its first line
    lines: list[str]


def blocks_of(text: str) -> list[Block]:
    blocks: list[Block] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            if inside:
                blocks[-1].lines.append(line)
        elif inside:
            inside = False
        else:
            inside = True
            blocks.append(Block(line.removeprefix("```"), number + 1, []))
    assert not inside, f"the block of line {blocks[-1].line} does not end"
    return blocks


def prose_of(text: str) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def sections_of(text: str) -> dict[str, str]:
    """The text under each heading of any depth, up to the next heading."""
    found = re.finditer(r"^```.*?^```$|^#+ ([^\n]+)$", text, flags=re.MULTILINE | re.DOTALL)
    headings = [match for match in found if match[1]]  # a comment in a block is none
    ends = [match.start() for match in headings[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(headings, ends, strict=True)}


def tables_of(text: str) -> list[list[list[str]]]:
    """The tables outside of blocks: for each, its rows of cells without the heads."""
    tables = re.findall(r"(?:^\|.*\n)+", prose_of(text) + "\n", flags=re.MULTILINE)
    return [[cells_of(line) for line in table.splitlines()[2:]] for table in tables]


def cells_of(line: str) -> list[str]:
    """The cells of a row; a bar that belongs to a cell has a backslash before it."""
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def table_in(page: Path, heading: str, index: int = 0) -> list[list[str]]:
    return tables_of(sections_of(page.read_text())[heading])[index]


def code(cell: str) -> str:
    """The text between backticks."""
    found = re.fullmatch(r"`([^`]*)`", cell)
    assert found, f"{cell!r} should be one word in backticks"
    return found[1]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


# -- examples ---------------------------------------------------------------------------------------------------


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    unknown = [block for block in blocks_of(page.read_text()) if block.kind not in KINDS]
    assert not unknown, f"{name_of(page)}:{unknown[0].line}: a block of kind {unknown[0].kind!r} is run by nobody"


@every_page
def test_the_examples_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == STREAMS:
        request.getfixturevalue("spark")  # the session that the page gets
        run_streams_page(tmp_path)
        return
    if page == BULK:
        run_bulk_page(tmp_path, monkeypatch)
        return
    if page == PIPELINE:
        run_pipeline_page(tmp_path)
        return
    if page == READERS:
        run_readers_page(tmp_path)
        return
    if page == CLIENT:
        run_client_page(tmp_path, monkeypatch)
        return
    if page == FUTURE:
        run_future_page(tmp_path, request.getfixturevalue("spark"), monkeypatch)
        return
    if page == IMPORT:
        run_import_page(tmp_path, request.getfixturevalue("spark"))
        return
    if page not in SERVED:
        run_page(page)
        return
    with serving(tmp_path / "postdate-data") as served:
        monkeypatch.setenv("POSTDATE_ADDR", served.address)
        run_page(page, served)


def run_bulk_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a broker with one far message, and its bulk."""
    data, token = folder / "postdate-data", "ab" * 32
    with serving(data, token=token) as served, bulking(served, data, token=token) as bulk:
        (data / TOKEN_FILE).write_text(token)
        with postdate.connect(served.address) as sender:
            sender.send("orders", "hello", key="order-17", delay="1d")
        wait_until(lambda: bool(bulk.broker.state().bulk))
        monkeypatch.setenv("POSTDATE_ADDR", served.address)
        run_page(BULK)


def run_readers_page(folder: Path) -> None:
    """Beside a table of four orders, of which the second is cancelled by its key and the third by its id."""
    at_ms = SystemClock().now_ms()
    world = World(folder / "postdate-data", at_ms)
    due = at_ms + HOUR_MS
    world.send("order", [due + n for n in range(4)], keys=[f"order-{n}" for n in (1, 2, 3, 4)])
    world.cancel("order-2", due + 1, "key")
    world.cancel("order-u2", due + 2, "unique")
    world.batch()
    world.close()
    run_page(READERS)


def run_client_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a broker and its bulk, which is on a free port."""
    with serving(folder / "postdate-data") as served, bulking(served, folder / "postdate-data") as bulk:
        monkeypatch.setenv("POSTDATE_ADDR", served.address)
        wait_until(lambda: bool(bulk.broker.state().bulk))
        run_page(CLIENT, served)


def run_streams_page(folder: Path) -> None:
    """Beside a broker with three messages that are visible."""
    data, token = folder / "postdate-data", "ab" * 32
    with serving(data, token=token) as served, bulking(served, data, token=token) as bulk:
        (data / TOKEN_FILE).write_text(token)
        with postdate.connect(served.address) as sender:
            for number, body in enumerate(("one", "two", "three"), 1):
                sender.send("orders", body, key=f"order-{number}")
        wait_until(lambda: bool(bulk.broker.state().bulk))
        # Spark takes a relative path from where its Java was started, which may be another test's folder.
        own = {"127.0.0.1:9876": served.address, '"checkpoint"': f'"{folder / "checkpoint"}"'}
        run_page(STREAMS, changed=own)


def run_pipeline_page(folder: Path) -> None:
    """Beside the table of a pipeline that has taken three messages."""
    world = World(folder / "postdate-data")
    world.send("order", [BEGIN + HOUR_MS + n for n in range(3)], keys=[f"order-{n}" for n in (1, 2, 3)])
    world.batch()
    world.close()
    run_page(PIPELINE)


def run_import_page(folder: Path, spark: Any) -> None:
    with carried(folder / "postdate-data") as world:
        run_page(IMPORT, changed={"127.0.0.1:9876": world.address})
    spark.conf.unset("spark.sql.session.timeZone")


def run_future_page(folder: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with carried(folder / "postdate-data", spark) as world:
        monkeypatch.setenv("POSTDATE_ADDR", world.served.address)
        run_page(FUTURE)


@contextlib.contextmanager
def carried(folder: Path, spark: Any = None) -> Iterator[World]:
    """A broker whose pipeline runs batch after batch."""
    world, ending = World(folder, spark=spark), threading.Event()

    def carry() -> None:
        while not ending.wait(0.2):
            world.batch()

    carrier = threading.Thread(target=carry)
    carrier.start()
    try:
        yield world
    finally:
        ending.set()
        carrier.join()
        world.close()


def run_page(page: Path, served: Served | None = None, changed: Mapping[str, str] = MappingProxyType({})) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    console, text = Console(served), page.read_text()
    for before, after in changed.items():
        assert before in text, f"{before} is not on the page"
        text = text.replace(before, after)
    for block in blocks_of(text):
        place = f"{name_of(page)}:{block.line}"
        if block.kind == "python":
            run_python(block, place, names)
        elif block.kind == "console":
            console.run(block.lines, place)
        elif block.kind == "sh":
            console.run([f"$ {line}" for line in block.lines if line], place)
        elif block.kind == "java":
            check_java(block, place)
        elif block.kind == "json":
            json.loads("\n".join(block.lines))
        elif block.kind == "toml":
            file = Path("page.toml")
            file.write_text("\n".join(block.lines))
            if "access_key" in file.read_text():
                file.chmod(0o600)
                assert find_login({"POSTDATE_CREDENTIALS": str(file)}).credentials
            else:
                load(file=file, environ={}, flags={})


def run_python(block: Block, place: str, names: dict[str, Any]) -> None:
    source = "\n" * (block.line - 1) + "\n".join(block.lines)  # so that a traceback has the page's lines
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, place, "exec"), names)
    promised = [line.partition("  # ")[2] for line in block.lines if line.lstrip().startswith("print(")]
    assert_output(printed.getvalue().splitlines(), promised, place)


# -- examples: commands


class Command(NamedTuple):
    text: str
    exit_code: int
    output: list[str]


def commands_of(lines: list[str]) -> Iterator[Command]:
    command: Command | None = None
    for line in lines:
        if line.startswith("$ "):
            if command:
                yield command
            text, _, code = line.removeprefix("$ ").partition("  # exit ")
            command = Command(text, int(code or 0), [])
        else:
            assert command, f"output without a command: {line!r}"
            command.output.append(line)
    if command:
        yield command


class Console:
    """Runs the commands of one page. Remembers what `...` stood for last."""

    def __init__(self, served: Served | None = None) -> None:
        self._served = served
        self._last = "..."

    def run(self, lines: list[str], place: str) -> None:
        for command in commands_of(lines):
            at = f"{place}: {command.text}"
            if command.text.startswith(NOT_RUN):
                check_script(command, place)
                continue
            printed = self._printed(command, at)
            if command.output:
                self._last = assert_output(printed, command.output, at) or self._last

    def _printed(self, command: Command, at: str) -> list[str]:
        argv = argv_of(command.text.replace("...", self._last))
        if command.text.startswith("postdate up") and not command.exit_code:
            return printed_by_up(argv)
        if command.text.startswith("postdate check") and self._served is not None:
            self._served.stop()
        done = subprocess.run(argv, capture_output=True, text=True, env=environment(), check=False)
        said = f"{at} ended with {done.returncode}: {done.stderr}"
        assert done.returncode == command.exit_code, said
        return [*done.stdout.splitlines(), *(done.stderr.splitlines() if command.exit_code else ())]


def printed_by_up(argv: list[str]) -> list[str]:
    """What a broker prints from start to stop, with the usual ports for those that it got."""
    folder = Path("up")
    folder.mkdir(exist_ok=True)
    ports = {f"POSTDATE_{name}_PORT": "0" for name in ("ROUTE", "BROKER", "VIP", "GRPC")}
    ports["POSTDATE_BULK_PORT"] = str(free_port())
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment() | ports, cwd=folder) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, f"{argv} ended with {process.returncode}"
    return as_usual(printed)


def as_usual(printed: list[str]) -> list[str]:
    text = "\n".join(printed)
    usual = Settings()
    found = re.findall(r"(?<=127\.0\.0\.1:)[0-9]+", text)
    shown_ports = (usual.route_port, usual.broker_port, usual.vip_port, usual.grpc_port, usual.bulk_port)
    for port, shown in zip(found[: len(shown_ports)], shown_ports, strict=True):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{shown}")
    return text.replace(f" --addr 127.0.0.1:{usual.route_port}", "").splitlines()


def check_script(command: Command, place: str) -> None:
    words = command.text.split()
    assert not command.output, f"{place}: {command.text} is not run, so nobody compares its output"
    if words[0].startswith("scripts/"):
        assert os.access(ROOT / words[0], os.X_OK), f"{place}: {words[0]} is not there or cannot be run"
    if words[0] == "python":
        module = ROOT / words[2].replace(".", "/")  # a file, or a folder with a command
        is_there = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert is_there, f"{place}: {module} is not there"


def argv_of(text: str) -> list[str]:
    """The command with this interpreter: the package need not be installed."""
    words = shlex.split(text)
    modules = {"postdate": [sys.executable, "-m", "postdate"], "python": [sys.executable]}
    assert words[0] in modules, f"{text!r} is not a command of ours"
    return [*modules[words[0]], *words[1:]]


def environment() -> dict[str, str]:
    # NO_COLOR and COLUMNS: what argparse prints must not depend on the terminal.
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}


def assert_output(printed: list[str], promised: list[str], place: str) -> str:
    """Compares; returns what the last `...` within a line stood for, empty where there is none."""
    parts = ["(?:.*\n)*?" if line == "..." else pattern_of(line) for line in promised]
    matches = re.fullmatch("".join(parts), "".join(line + "\n" for line in printed))
    assert matches, f"{place} prints\n" + "\n".join(printed)
    return (matches.groups() or ("",))[-1]


def pattern_of(line: str) -> str:
    return "(.*)".join(map(re.escape, line.split("..."))) + "\n"


# -- examples: Java


def check_java(block: Block, place: str) -> None:
    """Somebody else runs it: here it need only be the same."""
    text = "\n".join(block.lines).strip()
    sources = [file for folder in JAVA for file in sorted(folder.glob("*.java"))]
    files = [file for file in sources if text in java_texts(file.read_text())]
    assert files, (
        f"{place} equals no file of {' and '.join(str(each.relative_to(ROOT)) for each in JAVA)}, and no region"
    )
    run = "".join((INTEROP / name).read_text() for name in ("java.py", "grpc_java.py"))
    assert any(f'"{file.stem}"' in run for file in files), f"{place}: scripts/interop does not run {files[0].name}"


def java_texts(source: str) -> list[str]:
    """What a page may show of a file: all of it, or a region, moved to the left."""
    regions = re.findall(r"^ *// begin (\w+)\n(.*?)^ *// end \1$", source, flags=re.MULTILINE | re.DOTALL)
    return [source.strip(), *(textwrap.dedent(region).strip() for _, region in regions)]


# -- links and names --------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As the usual renderers make it: small letters, no punctuation, dashes for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def link_problems(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", prose_of(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target} leads nowhere"
        elif fragment and fragment not in map(anchor, sections_of(file.read_text())):
            yield f"{target} names no heading"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    assert list(link_problems(page, page.read_text())) == []


@every_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    paths = re.findall(r"`((?:postdate|tests|scripts|docs|benchmarks)/[\w./]+)`", prose_of(page.read_text()))
    assert [path for path in paths if path not in NOT_YET and not (ROOT / path).exists()] == []


# -- settings ---------------------------------------------------------------------------------------------------

FACTORS = {
    "": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
}  # fmt: skip


# As a file of settings has them; any other word in backticks is a text without its quotes.
WORDS: dict[str, bool | str] = {"true": True, "false": False, '""': ""}


def value_of(cell: str) -> int | str | None:
    """A default or a bound as the table shows it: `sync`, `true`, 4,096, 64 MiB, or nothing."""
    if not cell:
        return None
    if cell.startswith("`"):
        return WORDS.get(code(cell), code(cell))
    number, _, unit = cell.partition(" ")
    return int(number.replace(",", "")) * FACTORS[unit]


class SettingRow(NamedTuple):
    name: str
    default: int | str | None
    low: int | str | None
    high: int | str | None
    why: str


def setting_shown(cells: list[str]) -> SettingRow:
    name, default, _, low, high, why = cells
    return SettingRow(code(name), value_of(default), value_of(low), value_of(high), why)


def setting_held(field: "dataclasses.Field[Any]") -> SettingRow:
    bounds = field.metadata
    return SettingRow(field.name, getattr(Settings(), field.name), bounds["low"], bounds["high"], bounds["why"])


def test_every_setting_is_documented_as_it_is() -> None:
    for group, names in GROUPS.items():
        shown = [setting_shown(cells) for cells in table_in(SETTINGS, group.capitalize())]
        assert shown == [setting_held(FIELDS[name]) for name in names]


def test_every_limit_is_documented_as_it_is() -> None:
    shown = [(code(name), value_of(value), why) for name, value, _, why in table_in(SETTINGS, "Fixed limits")]
    assert shown == [(field.name, field.default, field.metadata["why"]) for field in LIMITS.values()]


def test_units_of_settings_are_those_of_their_names() -> None:
    tables = [table_in(SETTINGS, heading) for heading in (*map(str.capitalize, GROUPS), "Fixed limits")]
    for name, _, unit, *_ in itertools.chain(*tables):
        for part in ("bytes", "ms", "rows"):
            assert (f"_{part}" in code(name) or f"{part}_" in code(name)) == (unit == part), (name, unit)


def test_settings_that_change_while_the_broker_runs_are_named() -> None:
    heading = "Settings that change while the broker runs"
    listed = sections_of(SETTINGS.read_text())[heading].split("\n\n")[2]
    assert sorted(codes(listed)) == sorted(LIVE)
    assert {code(name): code(setting) for name, setting in table_in(SETTINGS, heading)} == ROCKETMQ_NAMES


# What they bound is no client's doing, or no amount of anything.
NOT_BY_CLIENTS = {
    "batch_bytes_max", "delay_ms_max", "rescue_blocks_max", "fire_pause_ms_max", "retry_times_max",
    "invisible_ms_max", "pipeline_pause_ms_max", "transaction_check_times_max",
}  # fmt: skip


def test_the_table_of_bounds_names_every_limit_with_its_default_and_a_test_that_is_there() -> None:
    rows = table_in(LIMITS_PAGE, "Bounds")
    named = {code(setting): (value_of(default), code(test)) for setting, default, _, _, test in rows}
    values = vars(Settings()) | vars(Limits())
    assert set(named) == {name for name in values if name.endswith("_max")} - NOT_BY_CLIENTS
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in TESTS), re.MULTILINE))
    for name, (default, test) in named.items():
        assert default == values[name], name
        assert test in tests, f"{name}: there is no {test}"


def test_settings_that_stay_with_a_folder_are_named() -> None:
    named = codes(sections_of(SETTINGS.read_text())["Settings that stay with a folder"])
    assert set(FIXED_SETTINGS) <= set(named)


# -- protocol ---------------------------------------------------------------------------------------------------


def names_in(cell: str) -> list[str]:
    """The names of a cell of the requests; a word in italics stands for those of a table further down."""
    tables = {"*send*": ("Fields of a send", 1), "*pull*": ("Fields of a pull", 0),
              "*sent*": ("Answer to a send", 0), "*pulled*": ("Answer to a pull", 0)}  # fmt: skip
    if cell not in tables:
        return codes(cell)
    heading, column = tables[cell]
    return [code(cells[column]) for cells in table_in(PROTOCOL, heading)]


def fields_of(request: Request, *, required: bool) -> list[str]:
    return [field.name for field in request.fields if field.required == required]


def test_every_request_is_documented_as_it_is() -> None:
    rows = table_in(PROTOCOL, "Requests")
    assert [(int(cells[0]), code(cells[1])) for cells in rows] == [(row.code, row.name) for row in REQUESTS.values()]
    for cells, request in zip(rows, REQUESTS.values(), strict=True):
        shown = set(names_in(cells[2])) | set(names_in(cells[3]))
        assert shown == {field.name for field in request.fields}, request.name
        assert tuple(names_in(cells[4])) == request.answer, request.name
        if not cells[2].startswith("*"):
            assert codes(cells[2]) == fields_of(request, required=True), request.name
            assert codes(cells[3]) == fields_of(request, required=False), request.name


class FieldRow(NamedTuple):
    name: str
    kind: str
    default: Any
    required: bool | None = None  # None where it depends on the request
    letter: str = ""


def default_of(cell: str) -> Any:
    if not cell:
        return None
    text = code(cell)
    return int(text) if text.removeprefix("-").isdigit() else WORDS.get(text, text)


def field_held(field: Field, *, required: bool | None) -> FieldRow:
    return FieldRow(field.name, field.kind.value, field.default, required, field.letter)


def test_fields_of_a_send_are_those_of_the_code() -> None:
    for request in (Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE):
        held = [field_held(field, required=field.required) for field in REQUESTS[request].fields]
        assert held == [
            FieldRow(code(name), kind, default_of(default), required == "yes", code(letter))
            for letter, name, kind, required, default, _ in table_in(PROTOCOL, "Fields of a send")
        ]


def test_fields_of_a_pull_are_those_of_the_code() -> None:
    for request in (Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE):
        held = [field_held(field, required=field.required) for field in REQUESTS[request].fields]
        assert held == [
            FieldRow(code(name), kind, default_of(default), required == "yes")
            for name, kind, required, default, _ in table_in(PROTOCOL, "Fields of a pull")
        ]


def test_fields_of_other_requests_are_those_of_the_code() -> None:
    common = {REQUESTS[Request.SEND_MESSAGE].fields, REQUESTS[Request.PULL_MESSAGE].fields}
    held: dict[str, FieldRow] = {}
    for request in REQUESTS.values():
        for field in () if request.fields in common else request.fields:
            row = field_held(field, required=None)
            known = held.setdefault(field.name, row)
            held[field.name] = row if known.default is None else known
            assert known.kind == row.kind, f"{field.name} is of two kinds"
    shown = [
        FieldRow(code(name), kind, default_of(default))
        for name, kind, default, _ in table_in(PROTOCOL, "Fields of other requests")
    ]
    assert shown == list(held.values())


def test_answer_codes_are_those_that_the_server_gives() -> None:
    rows = table_in(PROTOCOL, "Answer codes")
    assert all(getattr(wire_codes, code(name)) == int(number) for number, name, _ in rows)
    known = (ROOT / "postdate" / "wire" / "codes.py").read_text().partition("# Answers.")[2].partition("\n\n")[0]
    sources = "".join(file.read_text() for file in sorted((ROOT / "postdate" / "server").rglob("*.py")))
    given = set(re.findall(r"codes\.([A-Z_]+)", sources)) & set(re.findall(r"^([A-Z_]+) =", known, re.MULTILINE))
    assert {code(name) for _, name, _ in rows} == given


def test_errors_become_the_codes_that_are_shown() -> None:
    shown = [(code(name), int(number)) for name, number in table_in(PROTOCOL, "Answer codes", 1)]
    assert shown == [(error.__name__, number) for error, number in answers._CODES]


def shown_json(heading: str) -> bytes:
    return shown_text(heading, "json")


def shown_text(heading: str, kind: str = "text") -> bytes:
    blocks = blocks_of(sections_of(PROTOCOL.read_text())[heading])
    return "\n".join(next(block.lines for block in blocks if block.kind == kind)).encode()


def test_bodies_that_are_shown_are_those_of_the_code() -> None:
    broker = bodies.Broker("postdate", "DefaultCluster", "127.0.0.1:10911")
    assert json.loads(shown_json("Routes")) == json.loads(bodies.encode_route(broker, 4, 4, 6))
    (consumer,) = bodies.decode_heartbeat(shown_json("Heartbeats, members and notices")).consumers
    assert consumer.subscriptions == (bodies.parse_subscription("orders", "paid || refunded"),)
    assert bodies.decode_lock(shown_json("Locks")).queues == (bodies.QueueName("orders", "postdate", 0),)
    (queue,) = bodies.decode_by_queue(shown_text("Tables by queue"), "offsetTable")
    assert queue == bodies.QueueName("orders", "postdate", 0)


def test_what_waits_is_told_as_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as served, client.connect(served.address) as sender:
        sender.send("orders", "soon", delay="30s")
        sender.send("orders", "later", delay="1h")
        told = admin.pending(served.address)
    shown = json.loads(shown_json("GET_PENDING"))
    assert list(told) == list(shown)
    assert [list(told[name][0]) for name in ("topics", "times")] == [
        list(shown[name][0]) for name in ("topics", "times")
    ]


def test_headers_that_are_shown_are_those_of_the_code() -> None:
    text = sections_of(PROTOCOL.read_text())["Frames"]
    header = shown_json("Frames").replace(b"\n", b"")
    assert frame.decode(frame.encode_frame(header)[4:]).code == Request.GET_ROUTEINFO_BY_TOPIC
    assert ", ".join(frame.LANGUAGES) in " ".join(text.split())
    assert f"we write {wire_codes.PROTOCOL_VERSION}" in text
    assert f"we write `{wire_codes.LANGUAGE}`" in text


def test_the_recall_handle_is_as_shown() -> None:
    (block,) = blocks_of(sections_of(PROTOCOL.read_text())["Recall and delete marker"])
    _, topic, broker, due, key = block.lines[0].split()
    assert ids.parse_recall_handle(recall_handle(topic, broker, int(due), key)) == (topic, broker, int(due), key)


def test_what_is_said_to_be_unsupported_is_not_in_the_table() -> None:
    section = sections_of(PROTOCOL.read_text())["Not supported"]
    numbers = {int(number) for number in re.findall(r"\b\d{2,6}\b", section)}
    numbers -= {wire_codes.NO_PERMISSION}  # an answer
    assert REQUESTS.keys().isdisjoint(numbers)


def test_the_page_on_compatibility_names_every_request_as_working_and_no_other() -> None:
    rows = table_in(COMPATIBILITY, "Requests")
    named = {
        verdict: {int(number) for cells in rows if cells[2] == verdict for number in re.findall(r"\d+", cells[0])}
        for verdict in ("works", "ours", "refused with 3")
    }
    assert named["works"] | named["ours"] == REQUESTS.keys()
    assert named["refused with 3"].isdisjoint(REQUESTS)


def test_the_page_on_compatibility_counts_the_commands_of_mqadmin() -> None:
    said = re.search(r"\[(\d+) commands\]", COMPATIBILITY.read_text())
    assert said is not None
    assert int(said[1]) == len(table_in(MQADMIN, "Commands that do their work"))


# -- mqadmin ----------------------------------------------------------------------------------------------------


def test_commands_of_mqadmin_are_those_that_interop_types() -> None:
    programs = [file.read_text() for file in sorted((ROOT / "tests" / "interop" / "mqadmin").glob("*.py"))]
    typed = set(re.findall(r'(?:, \(|\[|types\(|\n +\(|\n +\[)"([a-z]+[A-Z]\w+|producer)"', "".join(programs)))
    assert {code(name) for name, _, _ in table_in(MQADMIN, "Commands that do their work")} == typed


def test_figures_are_those_that_the_broker_tells(tmp_path: Path) -> None:
    with serving(tmp_path) as served, client.connect(served.address) as sender:
        sender.send("orders", "hello")
        body = served.call(lambda: served.dispatcher.status._known_to_tools() | served.dispatcher.status._own_figures())
    told = {name for name in body if not name.endswith(("Mills", "QueueSize", "Morning"))}
    told -= {"getTransferedTps", "timerOffsetBehind", "brokerActive", "brokerVersion", "brokerVersionDesc"}
    assert {name for names, _ in table_in(MQADMIN, "Figures") for name in codes(names)} == told


# -- client -----------------------------------------------------------------------------------------------------


def errors_exported() -> dict[str, type[PostdateError]]:
    found = {name: getattr(client, name) for name in client.__all__}
    return {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, PostdateError)}


def test_errors_of_the_client_are_those_that_it_exports() -> None:
    by_code = {error: str(number) for number, error in errors._BY_CODE.items()}
    shown = {code(name): number for name, number, _ in table_in(CLIENT, "Errors")}
    assert shown == {name: by_code.get(error, "") for name, error in errors_exported().items()}


def test_every_name_of_the_client_is_explained() -> None:
    text = CLIENT.read_text()
    assert [name for name in client.__all__ if not re.search(rf"\b{name}\b", text)] == []


# -- command line -----------------------------------------------------------------------------------------------


def test_columns_of_the_table_are_those_of_the_code() -> None:
    shown = table_in(PIPELINE, "The table", 1)
    assert [(code(name), kind) for name, kind, _ in shown] == [(field.name, str(field.type)) for field in SCHEMA]
    assert [code(name) for name, _ in table_in(PIPELINE, "The table")] == [MESSAGES, HISTORY, CHECKPOINT]


def test_columns_of_the_history_are_those_of_the_code() -> None:
    (shown,) = re.findall(r"^`at_ms`.*?\.$", PIPELINE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert sorted(codes(shown)) == sorted(history.SCHEMA.names)


def test_numbers_of_the_pipeline_are_those_of_the_code() -> None:
    limits, options = merging.DEFAULT, driver.Options()
    days = merging.EDGE_MS // merging.DAY_MS
    assert batch.KEEP_MS == 60_000
    for number in (
        f"when {options.soon_rows:,} far rows wait",
        f"at\nmost {options.batch_rows:,} rows or {options.batch_bytes >> 30} GiB of them",
        f"ranges of {options.task_rows:,}, one for each task",
        f"about\n   {slices.TASK_ROWS:,} rows, cut by due",
        f"row groups of {ROW_GROUP_ROWS:,} rows",
        f"due within {days} days | merged by the hour when there are {limits.soon_files} files",
        f"beyond {days + 1} days, by the month, when there are {limits.later_files} files",
        f"cut into hours once, {days + 1} days before",
        f"rewrites at most {limits.rows:,} rows or {limits.bytes >> 30} GiB",
        f"holds some {slices.TASK_BYTES >> 20} MiB of records",
    ):
        assert number in PIPELINE.read_text(), number


def test_functions_of_predicates_are_those_of_the_code() -> None:
    shown = table_in(FUTURE, "What a predicate may use")
    assert {kind: tuple(names.replace("`", "").split(", ")) for kind, names in shown} == FUNCTIONS
    assert f"at most {CONCAT_MAX} texts" in FUTURE.read_text()
    assert f"{NODES_MAX:,} parts" in FUTURE.read_text()


def test_every_command_is_documented_as_it_is() -> None:
    shown = {code(name): summary for name, summary in table_in(CLI, "Command line")}
    assert shown == {f"postdate {name}": summary for name, summary in app.COMMANDS.items()}


def test_exit_codes_are_those_of_the_code() -> None:
    shown = {name: int(number) for number, name, _ in table_in(CLI, "Exit codes")}
    assert shown == {name: getattr(cli_command, name) for name in ("OK", "NEGATIVE", "USAGE", "REFUSED", "INTERRUPTED")}
    for name in app.COMMANDS:
        told = importlib.import_module(f"postdate.cli.{name}").HELP.partition("exit codes: ")[2]
        assert {int(number) for number in re.findall(r"(?:^|, )(\d+) ", told)} <= set(shown.values()), name


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's verbs by name; itself where it has none."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {"": parser}


def flags_held(name: str) -> dict[str, str]:
    """Every flag and argument of a command with its help, those of all verbs together."""
    command = parsers_of(app.build_parser([name]))[name]
    actions = [action for parser in parsers_of(command).values() for action in parser._actions]
    common, settings = {"--help", "--addr", "--json"}, {*FIELDS, *LIMITS} if name == "settings" else set()
    return {
        (action.option_strings[-1] if action.option_strings else str(action.metavar)): str(action.help)
        for action in actions
        if common.isdisjoint(action.option_strings) and not action.dest.startswith("_") and action.dest not in settings
    }


@pytest.mark.parametrize("name", [name for name in app.COMMANDS if name != "up"])
def test_flags_of_a_command_are_those_of_the_code(name: str) -> None:
    shown = {code(flag).partition(" ")[0]: text for flag, text in table_in(CLI, name)}
    assert shown == flags_held(name)


# -- log lines --------------------------------------------------------------------------------------------------


def log_formats() -> set[str]:
    """The texts of all log lines of server and client, with `...` for what differs."""
    found: set[str] = set()
    for part in ("server", "client", "tls.py"):
        for path in [ROOT / "postdate" / part, *(ROOT / "postdate" / part).rglob("*.py")]:
            if path.is_dir():
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%[.\d]*[a-z]", "...", node.value))
                elif isinstance(node, ast.JoinedStr):
                    parts = [each.value if isinstance(each, ast.Constant) else "..." for each in node.values]
                    found.add("".join(map(str, parts)))
    return found


@pytest.mark.parametrize("index", [0, 1])
def test_log_lines_are_those_of_the_code(index: int) -> None:
    known = log_formats()
    tables = [table for table in tables_of(OPERATIONS.read_text()) if codes(table[0][0]) and table[0][1] == "info"]
    for shown in [line for cells in tables[index] for line in codes(cells[0])]:
        words = [stripped for word in shown.split("...") if (stripped := word.strip(" :,;"))]
        assert any(all(word in text for word in words) for text in known), shown


# -- bulk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heading", "index", "schema"), [("Rows out", 1, OUT), ("Chunks in", 0, IN)])
def test_columns_of_bulk_are_those_of_the_code(heading: str, index: int, schema: pa.Schema) -> None:
    shown = [(code(name), code(kind)) for name, kind, _ in table_in(BULK, heading, index)]
    assert shown == [(field.name, str(field.type)) for field in schema]


def test_bulk_has_no_actions(tmp_path: Path) -> None:
    with serving(tmp_path) as served, bulking(served, tmp_path) as bulk:
        assert list(bulk.flight.list_actions()) == []


def test_columns_of_a_topic_are_those_of_the_code() -> None:
    more = [(code(name), code(kind)) for name, kind, _ in table_in(BULK, "Rows out", 2)]
    assert more == [
        (field.name, str(field.type).replace(" ('", "").replace("')", "")) for field in list(OF_TOPIC)[len(OUT) :]
    ]


# -- topics in Spark --------------------------------------------------------------------------------------------


def test_columns_of_a_topic_in_spark_are_those_of_the_code() -> None:
    shown = [(code(name), code(kind)) for name, kind, _ in table_in(STREAMS, "Columns")]
    assert shown == list(topic.COLUMNS.items())


def test_options_of_a_topic_in_spark_are_those_of_the_code() -> None:
    shown = {code(name): default.strip("`") for name, default, _ in table_in(STREAMS, "Options")}
    asked = topic.asked_of({"topic": "t"})
    held = {"addr": ADDRESS_DEFAULT, "bulk": asked.bulk, "topic": "", "start": asked.start, "stop": asked.stop}
    assert shown == {**held, "rows": str(asked.rows), "columns": "all"}
    assert tuple(shown) == topic.OPTIONS


# -- formats ----------------------------------------------------------------------------------------------------

TYPES = {
    "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "4 bytes": "4s",
}  # fmt: skip


class Layout(NamedTuple):
    """A fixed-width thing: as the page shows it, or as the code has it."""

    size: int
    positions: list[int]
    format: str


class Section(NamedTuple):
    heading: str
    source: str  # the line that names the file, what in it, and the size
    picture: list[str]
    rows: list[list[str]]


def layout_sections() -> list[Section]:
    found = []
    for heading, text in sections_of(FORMATS.read_text()).items():
        source = re.search(r"`(postdate/\S+\.py)`: .*", text)
        pictures = [block.lines for block in blocks_of(text) if block.kind == "text" and block.lines[1].startswith("+")]
        if pictures:
            assert source, f"{heading}: where in the code is it?"
            found.append(Section(heading, source[0], pictures[0], tables_of(text)[0]))
    return found


every_layout = pytest.mark.parametrize("section", layout_sections(), ids=lambda section: section.heading)


def shown_layout(section: Section) -> Layout:
    size = re.search(r"(\d+) bytes", section.source)
    assert size, section.source
    positions = [int(cells[0]) for cells in section.rows]
    return Layout(int(size[1]), positions, "".join(TYPES[cells[2]] for cells in section.rows))


def held_layout(section: Section) -> Layout:
    """What the code says: a dtype, a struct or two one behind the other; a record's head where none is named."""
    path, *names = codes(section.source)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    found = [getattr(module, name) for name in names]
    if not found:
        found = [records._BY_HOST_BITS[0].head]
    if isinstance(found[0], np.dtype):
        return dtype_layout(found[0])
    order = found[0].format[0]
    assert order == (">" if "big-endian" in section.source else "<"), section.heading
    return struct_layout(order, "".join(each.format[1:] for each in found))


def dtype_layout(dtype: np.dtype) -> Layout:
    assert dtype.fields is not None
    fields = [dtype.fields[name] for name in dtype.names or ()]
    assert all(field[0].str[0] in "<|" for field in fields), f"{dtype} is not little-endian"
    code_of = {np.dtype(f"<{kind}{size}").str[1:]: TYPES[f"{kind}{8 * size}"] for kind in "ui" for size in (1, 2, 4, 8)}
    return Layout(dtype.itemsize, [int(field[1]) for field in fields], "".join(code_of[f[0].str[1:]] for f in fields))


def struct_layout(order: str, text: str) -> Layout:
    items = re.findall(r"4s|[a-zA-Z]", text)
    positions = [struct.calcsize(order + "".join(items[:index])) for index in range(len(items))]
    return Layout(struct.calcsize(order + text), positions, "".join(items))


@every_layout
def test_a_table_of_bytes_agrees_with_the_code(section: Section) -> None:
    assert shown_layout(section) == held_layout(section)


@every_layout
def test_fields_of_a_dtype_have_the_names_of_its_table(section: Section) -> None:
    path, *names = codes(section.source)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    held = getattr(module, names[0]) if names else None
    if isinstance(held, np.dtype):
        assert [code(cells[1]) for cells in section.rows] == list(held.names or ())


@every_layout
def test_a_picture_shows_the_fields_and_positions_of_its_table(section: Section) -> None:
    drawn = [name for line in section.picture if line.startswith("|") for name in re.findall(r"\w+", line)]
    assert drawn == [code(cells[1]) for cells in section.rows]
    rulers = [list(map(int, re.findall(r"\d+", line))) for line in section.picture if line[0].isdigit()]
    assert all(above[-1] == below[0] for above, below in pairwise(rulers))
    marks = sorted({mark for ruler in rulers for mark in ruler})
    assert marks == [*shown_layout(section).positions, shown_layout(section).size]


@every_layout
def test_numbers_of_a_ruler_stand_above_their_corners(section: Section) -> None:
    for ruler, edge in pairwise(section.picture):
        if ruler[0].isdigit():
            corners = [index for index, character in enumerate(edge) if character == "+"]
            assert [found.start() for found in re.finditer(r"\d+", ruler)] == corners


def test_every_stored_layout_has_its_section() -> None:
    named = {name for section in layout_sections() for name in codes(section.source)[1:]}
    assert named >= {
        "BATCH_HEAD",
        "CHECKSUM",
        "ROW",
        "ENTRY",
        "TIME",
        "FAR",
        "INDEX",
        "ONCE_ROW",
        "CHUNK_HEAD",
        "CHUNK_ROW",
        "SELECTION_HEAD",
        "SELECTED",
        "SNAPSHOT_HEAD",
        "SECTION",
        "SLOT_HEAD",
        "SINGLE",
    }
    assert len(layout_sections()) == 17, "these, and the head of an index of keys"


def test_magic_numbers_are_those_of_the_code() -> None:
    text = FORMATS.read_text()
    for name in ("storage.batch", "storage.chunk", "storage.selection", "storage.snapshot", "table.keys"):
        module = importlib.import_module(f"postdate.{name}")
        letters = module.MAGIC.to_bytes(4, "little").decode()
        assert f"`{module.MAGIC:#010x}`, the letters {letters}" in text
    assert f"`0x{records.MAGIC_V1:08X}`, version 1; `0x{records.MAGIC_V2:08X}`, version 2" in text


def test_versions_are_those_of_the_code() -> None:
    shown: dict[str, int] = {}
    for section in layout_sections():
        versions = [cells[3] for cells in section.rows if cells[1] == "`version`"]
        shown |= {codes(section.source)[1]: int(version) for version in versions}
    names = ("batch", "chunk", "selection", "snapshot")
    held = {f"{name.upper()}_HEAD": importlib.import_module(f"postdate.storage.{name}").VERSION for name in names}
    assert shown == held | {"HEAD": keys.VERSION}


def test_the_format_file_is_as_shown() -> None:
    shown = next(json.loads(block.lines[0]) for block in blocks_of(FORMATS.read_text()) if block.kind == "json")
    defaults = vars(Settings()) | vars(Limits())
    assert shown == {"format": FORMAT} | {name: defaults[name] for name in FIXED_SETTINGS}
    assert [code(cells[0]) for cells in table_in(FORMATS, "FORMAT")] == list(shown)


# -- formats: the folder and the JSON, compared with what a broker writes ---------------------------------------


def write_every_record(data: Data) -> None:
    """A folder with every kind of record, a message in each place where one can be, a chunk and a snapshot."""
    broker = data.open(dataclasses.replace(SMALL, lead_ms=SMALL.lead_ms // 2))
    broker.put_topic("other", T0)
    broker.delete_topic("other", T0)
    broker.put_group("readers", {"retries": 3}, T0)
    broker.delete_group("writers", T0)
    broker.commit_offsets("readers", [(TOPIC, 0, 0)], T0)
    broker.values.put("mine", "colour", "red", T0)
    broker.values.delete("mine", "colour", T0)
    broker.cancel(TOPIC, "nobody", T0 + HOUR_MS, T0)
    staged = message("staged", due=T0 + HOUR_MS)
    ticket = send(broker, T0, staged, message("rescued", due=T0 + MINUTE_MS), message("soon", due=T0 + SECOND_MS))
    send(broker, T0, *[message(unique=f"u{n}") for n in range(SMALL_LIMITS.queue_file_rows)])  # a block of the index
    send(broker, T0, message(POSTDATE_ONCE="order-42"))
    send(broker, T0, message("moved", unique="moved", due=T0 + 2 * HOUR_MS))
    (found,) = [each for each in broker.find(TOPIC, "moved") if each is not None]
    place = MovedFrom(found.due_at_ms, found.arrival, found.is_near)
    settled(broker, broker.moves.move([Source(found.record, place, T0 + HOUR_MS)], T0))
    half = message("half", unique="half", TRAN_MSG="true", PGROUP="producers")
    place_of_half = broker.transactions.write_half(broker.transactions.prepare_half(half, T0), T0).offsets[0]
    broker.flush()
    broker.transactions.note_checked(broker.transactions.take_due_checks(T0 + MINUTE_MS), T0)
    settled(broker, broker.transactions.end(place_of_half, T0, is_commit=True))
    rolled_back = broker.transactions.write_half(broker.transactions.prepare_half(half, T0), T0).offsets[0]
    broker.flush()
    settled(broker, broker.transactions.end(rolled_back, T0, is_commit=False))
    advance(broker, T0 + MINUTE_MS)
    queue = broker.fold.topics.get(TOPIC).numbers[0]
    write_chunk(data.disk, "00000001", [(T0 + HOUR_MS, ticket.offsets[0], queue, staged)])
    stage(broker, registered(broker), broker.fold.far.length, T0 + HOUR_MS, ["00000001"], T0 + MINUTE_MS)
    pop_everything(broker)
    ask_for_jobs(broker)
    data.close(broker)


def ask_for_jobs(broker: Broker) -> None:
    """An import that waits, one that is given up, and a cancel that is decided, at a minute past T0."""
    at_ms, jobs = T0 + MINUTE_MS, broker.jobs
    settled(broker, jobs.begin("import", TOPIC, at_ms))
    settled(broker, jobs.adopt("import", [["_import-1.parquet", 1, 1, 1, 1, 1, 1]], 0, at_ms))
    far, number = broker.fold.far, broker.fold.jobs.all()[0].number
    places = (far.taken, far.taken), (far.horizon_at_ms, far.horizon_at_ms)
    broker.stage(Stage(far.epoch, *places, (), far.rows_in, 0, ((number, -1, at_ms),)), at_ms)
    settled(broker, jobs.begin("given-up", TOPIC, at_ms))
    settled(broker, jobs.fail("given-up", "no more", at_ms))
    job = require_job(settled(broker, jobs.ask("cancel", "cancel", "true", 0, at_ms)))
    rows = np.zeros(1, SELECTED)
    rows["due"], rows["arrival"] = T0 + 24 * HOUR_MS, 1
    name = f"{job.number:08d}-part"
    selection.write(broker._disk, name, rows)
    selected = Selection(broker.fold.far.epoch, job.number, ((name, 0),))
    settled(broker, jobs.decide(selected, jobs.verify(selected), at_ms))


def pop_everything(broker: Broker) -> None:
    """Pops, fails, gives back, changes and acknowledges, and retries what was pulled, at a minute past T0."""
    at_ms = T0 + MINUTE_MS
    ask = PopRequest("readers", TOPIC, [0], 32, 1 << 20, SECOND_MS, 16)
    popped = settled(broker, broker.leases.pop(ask, at_ms))
    handles = [LeaseHandle(TOPIC, 0, given.offset, at_ms) for given in popped.messages]
    settled(broker, broker.leases.renew("readers", handles[0], MINUTE_MS, at_ms))
    settled(broker, broker.leases.fail("readers", handles[0], [MINUTE_MS], "why", at_ms))
    settled(broker, broker.leases.change_invisible("readers", handles[0], MINUTE_MS, at_ms, is_begun=False))
    failed = FailedMessage(TOPIC, 0, handles[0].offset, 0, "why")
    settled(broker, broker.leases.retry("pullers", failed, [MINUTE_MS], 16, at_ms))
    settled(broker, broker.leases.acknowledge("readers", handles, at_ms))


def test_system_records_have_the_fields_that_are_shown(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    write_every_record(data)
    assert app.main(["log", str(data.folder), "--json"]) == 0
    written: dict[str, set[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        entry = json.loads(line)
        written.setdefault(entry["kind"], set()).update(entry.get("content", {}))
    kinds, fields = (table_in(FORMATS, "System records", index) for index in (0, 1))
    assert {int(number): name for number, name, _ in kinds} == KIND_NAMES
    assert {name: set(codes(body)) for _, name, body in kinds} == written
    explained: dict[str, set[str]] = {name: set() for name in written}
    for kind, names, _ in fields:
        explained[kind].update(codes(names))
    assert explained == written


def test_the_folder_has_the_tree_that_is_shown(data: Data) -> None:
    write_every_record(data)
    tree = next(block.lines for block in blocks_of(sections_of(FORMATS.read_text())["The data folder"]))
    shown = {line.split()[0].rstrip("/") for line in tree if re.match(r"  \S", line)}
    assert shown == {path.name for path in data.folder.iterdir()}
    assert {path.name for path in (data.folder / "queues" / "18").iterdir()} == {"entries", "times"}
    folders = [
        path
        for path in data.folder.rglob("*")
        if path.parent.name in ("log", "entries", "times", "far", "index", "snapshots")
    ]
    assert len(folders) >= 6
    assert all(re.fullmatch(r"\d{20}", path.name) for path in folders)


def test_snapshots_have_the_sections_and_parts_that_are_shown(data: Data) -> None:
    write_every_record(data)
    (position, *_) = snapshot.positions(data.disk)
    sections = snapshot.read(data.disk, position)
    kinds, parts = (table_in(FORMATS, "Section of a snapshot", index) for index in (1, 2))
    known = {"end": snapshot.END, "state": snapshot.STATE, "slots": snapshot.SLOTS, "sums": snapshot.SUMS}
    assert {name: int(number) for number, name, _ in kinds} == known
    written = [name for section in sections if section.kind == snapshot.STATE for name in section.json()]
    assert sorted(name for cells in parts for name in codes(cells[0])) == sorted(written)
    assert f"{BLOCK_ROWS:,} rows" in FORMATS.read_text()


# -- the readers above can fail -----------------------------------------------------------------------------------


def test_a_wrong_print_is_noticed() -> None:
    with pytest.raises(AssertionError, match="page:1"):
        run_python(Block("python", 1, ["print(1)  # 2"]), "page:1", {})


def test_a_failing_command_is_noticed() -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        Console().run(["$ postdate check no-such-folder"], "page:1")
    with pytest.raises(AssertionError, match="ended with 2"):
        Console().run(["$ postdate check no-such-folder  # exit 1"], "page:1")
    with pytest.raises(AssertionError, match="not a command of ours"):
        Console().run(["$ rm -r everything"], "page:1")
    with pytest.raises(AssertionError, match="is not there"):
        Console().run(["$ scripts/no-such"], "page:1")
    with pytest.raises(AssertionError, match="is not there"):
        Console().run(["$ python -m benchmarks.no_such --quick"], "page:1")
    with pytest.raises(AssertionError, match="nobody compares"):
        Console().run(["$ scripts/test", "all is well"], "page:1")


def test_a_command_may_fail_as_shown() -> None:
    Console().run(["$ postdate check no-such-folder  # exit 2", "postdate: no-such-folder is not a folder"], "page:1")


def test_a_gap_in_a_command_is_filled_from_the_output_before() -> None:
    Console().run(
        ["$ python -c 'print(\"got 42 apples\")'", "got 4... apples", "$ python -c 'assert ... == 2'"], "page:1"
    )


def test_the_python_of_another_client_is_the_program_that_is_run() -> None:
    source = (INTEROP / "grpc" / "python" / "quick_start.py").read_text()
    assert f"```text\n{source}```" in (ROOT / "docs" / "grpc.md").read_text()
    assert '"quick_start.py"' in (INTEROP / "grpc_python.py").read_text()


def test_java_that_nobody_compiles_is_noticed() -> None:
    with pytest.raises(AssertionError, match="page:1 equals no file"):
        check_java(Block("java", 1, ["final class NoSuch {}"]), "page:1")


def test_a_region_of_a_java_file_is_known_by_its_name() -> None:
    source = "class A {\n    // begin one\n    int a;\n      int b;\n    // end one\n}\n"
    assert java_texts(source) == [source.strip(), "int a;\n  int b;"]


@pytest.mark.parametrize(
    ("promised", "holds"),
    [
        (["a", "b"], True),
        (["a", "..."], True),
        (["...", "b"], True),
        (["..."], True),
        (["a"], False),
        (["a", "c"], False),
        (["b", "..."], False),
        (["a", "b", "c"], False),
        (["a...", "b"], True),
        (["a", "...", "b"], True),
        (["...a..."], False),
    ],
)
def test_shown_output_is_compared(promised: list[str], holds: bool) -> None:
    if holds:
        assert_output(["a", "b"], promised, "page:1")
    else:
        with pytest.raises(AssertionError, match="page:1 prints"):
            assert_output(["a", "b"], promised, "page:1")


def test_links_that_lead_nowhere_are_noticed() -> None:
    text = "[a](no-such.md) [b](README.md#start) [c](README.md#nowhere) [d](https://example.org) [e](docs)"
    assert list(link_problems(ROOT / "README.md", text)) == [
        "no-such.md leads nowhere",
        "README.md#nowhere names no heading",
    ]


@pytest.mark.parametrize(
    ("edit", "shown"),
    [
        (("48 bytes", "52 bytes"), "size"),
        (("| 4 | `queue`", "| 5 | `queue`"), "positions"),
        (("`due` | i64", "`due` | u64"), "format"),
    ],
)
def test_a_wrong_table_of_bytes_is_noticed(edit: tuple[str, str], shown: str) -> None:
    right = next(section for section in layout_sections() if section.heading == "Row of a batch")
    lines = "\n".join([right.source, *("| " + " | ".join(cells) + " |" for cells in right.rows)])
    source, *rows = lines.replace(*edit).splitlines()
    wrong = shown_layout(right._replace(source=source, rows=[cells_of(line) for line in rows]))
    assert getattr(wrong, shown) != getattr(held_layout(right), shown)


def test_cells_with_units_are_read() -> None:
    cells = ["", "`sync`", "`true`", '`""`', "4,096", "64 MiB", "72 h", "10", "-1"]
    assert [value_of(cell) for cell in cells] == [None, "sync", True, "", 4_096, 64 << 20, 72 * HOUR_MS, 10, -1]
