"""Processes beside the broker: real ones, small programs of the test's own."""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from postdate.clock import SystemClock
from postdate.config import Limits
from postdate.server import Addresses, Part, Parts
from postdate.server import children as parts_module

WAIT_S = 60.0
FAST: dict[str, Any] = {"pipeline_pause_ms_min": 10, "pipeline_pause_ms_max": 40, "parts_stop_ms": 20_000}

SERVES = "import time; print('bulk listens on 127.0.0.1:7', flush=True); time.sleep(600)"
STAYS = "import time; print('runs', flush=True); time.sleep(600)"
ON_TERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"


def command(program: str, *words: str) -> Callable[[Addresses], Sequence[str]]:
    return lambda _: [sys.executable, "-I", "-S", "-c", program, *words]


def run(story: Coroutine[Any, Any, None]) -> None:
    """On the loop that a broker has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story, WAIT_S))


@asynccontextmanager
async def running(*parts: Part, **limits: Any) -> Any:
    all_parts = Parts(Limits(**(FAST | limits)), SystemClock(), parts, {})
    await all_parts.start("127.0.0.1:1")
    try:
        yield all_parts
    finally:
        await all_parts.stop()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # other processes tell no event
        await asyncio.sleep(0.005)


def pid_in(sentence: str) -> int:
    return int(sentence.rpartition("(process ")[2].rstrip(")"))


def is_alive(pid: int) -> bool:
    """Whether a process is there that does anything: what nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- start ------------------------------------------------------------------------------------------------------


def test_a_part_is_started_after_the_one_that_it_needs_and_told_its_address(tmp_path: Path) -> None:
    told: list[dict[str, str]] = []

    def second(addresses: Addresses) -> Sequence[str]:
        told.append(dict(addresses))
        return command(STAYS)(addresses)

    async def story() -> None:
        go = tmp_path / "go"
        waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n{SERVES}"
        bulk = Part("bulk", command(waits))
        async with running(bulk, Part("pipeline", second, after=bulk)) as parts:
            await until(lambda: parts["bulk"].startswith("starts (process "))
            assert parts["pipeline"] == "waits for bulk"
            go.touch()
            await until(lambda: parts["pipeline"].startswith("runs (process "))
            assert parts["bulk"].startswith("listens on 127.0.0.1:7 (process ")
            assert list(parts) == ["bulk", "pipeline"]
        assert dict(parts) == {"bulk": "stopped", "pipeline": "stopped"}

    run(story())
    assert told == [{"broker": "127.0.0.1:1", "bulk": "127.0.0.1:7"}]


def test_a_part_is_not_who_has_started_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator has for commands of his own would sign its requests, and encrypt where nobody wants that."""
    monkeypatch.setenv("POSTDATE_SECRET_KEY", "wonderland")
    monkeypatch.setenv("POSTDATE_TLS", "1")
    monkeypatch.setenv("POSTDATE_CA_FILE", "ca.pem")
    shows = f"import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w')); {STAYS}"
    part = Part("bulk", command(shows, str(tmp_path / "environment")))

    async def story() -> None:
        async with running(part):
            await part.is_up.wait()

    run(story())
    found = json.loads((tmp_path / "environment").read_text())
    assert {name: value for name, value in found.items() if name.startswith("POSTDATE_")} == {"POSTDATE_TLS": "0"}


def test_a_part_that_lacks_something_says_so_and_looks_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needed, looks = tmp_path / "needed", 0

    def needs() -> dict[str, str] | str:
        nonlocal looks
        looks += 1
        return {"FOUND": "yes"} if needed.exists() else "nothing was found"

    async def story() -> None:
        program = f"import os, time; open({str(tmp_path / 'told')!r}, 'w').write(os.environ['FOUND']); {STAYS}"
        async with running(Part("pipeline", command(program), needs=needs)) as parts:
            assert parts["pipeline"] == "nothing was found"  # known when start has returned
            await until(lambda: looks >= 3)
            needed.touch()
            await until(lambda: parts["pipeline"].startswith("runs"))
            await until(lambda: (tmp_path / "told").exists() and bool((tmp_path / "told").read_text()))
            assert (tmp_path / "told").read_text() == "yes"

    run(story())
    assert caplog.messages == ["pipeline: nothing was found"]  # once, however often it was looked for


def test_what_it_needs_may_take_long_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_NEEDS_S", 0.01)
    found = threading.Event()

    def needs() -> dict[str, str]:
        found.wait(WAIT_S)
        return {}

    async def story() -> None:
        async with running(Part("pipeline", command(STAYS), needs=needs)) as parts:
            assert parts["pipeline"] == "starts"

    run(story())  # it is stopped, and its loop closed, while something is still being looked for
    found.set()


def test_a_program_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with running(Part("bulk", lambda _: ["/no/such/program"])) as parts:
            await until(lambda: "cannot start" in parts["bulk"])

    run(story())
    assert "bulk cannot start: /no/such/program: No such file or directory; it starts again in 0.01 s" in (
        caplog.messages
    )


# -- death ------------------------------------------------------------------------------------------------------


def pauses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text.rpartition(" in ")[2] for text in caplog.messages if "it starts again" in text]


def test_one_that_dies_is_started_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        dies = "import sys; sys.stderr.write('first\\nthe disk is full\\n'); sys.exit(3)"
        async with running(Part("bulk", command(dies))) as parts:
            await until(lambda: len(pauses(caplog)) >= 4)
            await until(lambda: parts["bulk"].startswith("starts again in 0 s"))
            assert parts["bulk"] == "starts again in 0 s: it ended with code 3 (the disk is full)"

    run(story())
    assert pauses(caplog)[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert caplog.messages[:3] == [
        "bulk ended with code 3; it starts again in 0.01 s",
        "bulk wrote: first",
        "bulk wrote: the disk is full",
    ]


def test_one_that_runs_again_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        async with running(Part("bulk", command(SERVES))) as parts:
            await until(lambda: "(process " in parts["bulk"] and parts["bulk"].startswith("listens"))
            assert "bulk runs again" not in caplog.messages
            os.kill(pid_in(parts["bulk"]), signal.SIGKILL)
            await until(lambda: "bulk runs again" in caplog.messages)

    run(story())


def test_after_a_while_that_went_well_the_pause_is_the_first_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        lives = "import time; time.sleep(0.2)"
        async with running(Part("bulk", command(lives)), pipeline_steady_ms=100):
            await until(lambda: len(pauses(caplog)) >= 3)

    run(story())
    assert set(pauses(caplog)) == {"0.01 s"}


def test_a_killed_one_takes_what_it_started_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = tmp_path / "child"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r} + '.new', 'w').write(str(child.pid))\n"
        f"import os; os.rename({str(child)!r} + '.new', {str(child)!r})\n"
        "time.sleep(600)"
    )

    async def story() -> None:
        async with running(Part("pipeline", command(program)), pipeline_pause_ms_min=5_000) as parts:
            await until(child.exists)
            os.kill(pid_in(parts["pipeline"]), signal.SIGKILL)
            await until(lambda: parts["pipeline"].endswith("s: it was killed by SIGKILL"))
            await until(lambda: not is_alive(int(child.read_text())))

    run(story())
    assert "pipeline was killed by SIGKILL; it starts again in 5 s" in caplog.messages


def test_a_mistake_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def mistake(_: Addresses) -> Sequence[str]:
        raise AssertionError("ours")

    async def story() -> None:
        async with running(Part("bulk", mistake)):
            await until(lambda: bool(caplog.records))

    run(story())
    assert caplog.messages == ["a part is no longer watched"]


# -- what it says -----------------------------------------------------------------------------------------------


def test_lines_of_ours_keep_their_level_and_anything_else_is_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    lines = (
        "2027-01-01T07:00:00.000Z warning  the table is slow\n"
        "2027-01-01T07:00:00.000Z info     took 5 rows\n"
        "27/01/01 07:00:00 WARN Utils: set a local address\n"
        "\tat org.apache.spark.Some.thing(Some.scala:1)\n"
        "Caused by: java.io.IOException: x\n"
        "\t... 12 more\n"
        "Traceback (most recent call last):\n"
        '  File "driver.py", line 1, in <module>\n'
        "\n"
        "2027-01-01T07:00:00.000Z error    it is over\n"
    )
    program = f"import sys; sys.stderr.write({lines!r}); sys.exit(1)"

    async def story() -> None:
        async with running(
            Part("pipeline", command(program)), pipeline_pause_ms_min=1_000, pipeline_pause_ms_max=1_000
        ):
            await until(lambda: bool(pauses(caplog)))

    with caplog.at_level(logging.INFO):
        run(story())
    assert [(record.levelname, record.getMessage()) for record in caplog.records][:5] == [
        ("WARNING", "pipeline: the table is slow"),
        ("INFO", "pipeline: took 5 rows"),
        ("ERROR", "pipeline: it is over"),
        ("WARNING", "pipeline ended with code 1; it starts again in 1 s"),
        ("WARNING", "pipeline wrote: 27/01/01 07:00:00 WARN Utils: set a local address"),
    ]
    assert len(caplog.records) == 5


def test_a_flood_and_a_line_without_end_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys; sys.stderr.write('noise\\n' * 100_000 + 'x' * 1_000_000); sys.exit(1)"

    async def story() -> None:
        async with running(Part("bulk", command(program)), pipeline_pause_ms_min=1_000, pipeline_pause_ms_max=1_000):
            await until(lambda: bool(pauses(caplog)))

    with caplog.at_level(logging.INFO):
        run(story())
    said = [text for text in caplog.messages if text.startswith("bulk wrote: ")]
    assert said == [*["bulk wrote: noise"] * 7, f"bulk wrote: {'x' * 4_096}"]


# -- stop -------------------------------------------------------------------------------------------------------


def test_the_last_is_stopped_first_and_the_next_when_it_has_ended(tmp_path: Path) -> None:
    book = tmp_path / "book"
    book.touch()
    program = (
        "import signal, sys, time\n"
        "def note(what): open(sys.argv[1], 'a').write(sys.argv[2] + what)\n"
        "def end(*_): note(' asked, '); time.sleep(0.2); note(' ended, '); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); note(' runs, ')\n"
        "print('bulk listens on 127.0.0.1:7', flush=True); time.sleep(600)"
    )

    async def story() -> None:
        bulk = Part("bulk", command(program, str(book), "bulk"))
        async with running(bulk, Part("pipeline", command(program, str(book), "pipeline"), after=bulk)):
            await until(lambda: "pipeline runs" in book.read_text())

    run(story())
    assert book.read_text() == ("bulk runs, pipeline runs, pipeline asked, pipeline ended, bulk asked, bulk ended, ")


def test_one_that_does_not_stop_is_killed_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stubborn = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('bulk listens on 127.0.0.1:7', flush=True); open(sys.argv[1], 'w'); time.sleep(600)"
    )
    pids: list[int] = []

    async def story() -> None:
        bulk = Part("bulk", command(stubborn, str(tmp_path / "bulk")))
        pipeline = Part("pipeline", command(stubborn, str(tmp_path / "pipeline")), after=bulk)
        async with running(bulk, pipeline, parts_stop_ms=300) as parts:
            await until((tmp_path / "pipeline").exists)
            pids.extend(pid_in(parts[name]) for name in parts)

    run(story())
    assert caplog.messages == [
        "pipeline has not stopped within 0.3 s and is killed",
        "bulk has not stopped within 0.2 s and is killed",
    ]
    assert [pid for pid in pids if is_alive(pid)] == []


def test_a_stop_during_a_pause_starts_nothing_more(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    program = f"open({str(starts)!r}, 'a').write('x')"

    async def story() -> None:
        async with running(Part("bulk", command(program)), pipeline_pause_ms_min=60_000) as parts:
            await until(lambda: parts["bulk"].startswith("starts again in"))

    run(story())
    assert starts.read_text() == "x"


def test_signals_of_the_terminal_do_not_reach_a_part() -> None:
    """A terminal signals the group in front of it; a part is in a group of its own. In our session: niceness counts
    inside one only.
    """

    async def story() -> None:
        async with running(Part("bulk", command(ON_TERM + STAYS))) as parts:
            await until(lambda: parts["bulk"].startswith("runs"))
            pid = pid_in(parts["bulk"])
            assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)

    run(story())
