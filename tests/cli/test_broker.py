"""The commands that talk to a broker, on a real one: what they print, what they do, their exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate import cli
from postdate.cli.render import moment
from postdate.clock import ManualClock
from postdate.contract import Stage
from tests.support.core import HOUR_MS, MINUTE_MS, T0
from tests.support.peer import connected, make_topic, sent
from tests.support.server import WAIT_S, Served, serving

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A broker whose clock stands at T0, found by POSTDATE_ADDR."""
    with serving(tmp_path / "data", ManualClock(T0)) as found:
        monkeypatch.setenv("POSTDATE_ADDR", found.address)
        yield found


def run(capsys: Capsys, *words: object, code: int = 0) -> list[str]:
    """The lines on stdout of a command that ends with this exit code and says nothing on stderr."""
    assert cli.main([str(word) for word in words]) == code, capsys.readouterr()
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def run_json(capsys: Capsys, *words: object, code: int = 0) -> Any:
    lines = [json.loads(line) for line in run(capsys, *words, "--json", code=code)]
    return lines[0] if len(lines) == 1 else lines


def assert_refused(capsys: Capsys, code: int, sentence: str, *words: object) -> None:
    """Nothing on stdout, one sentence on stderr."""
    assert cli.main([str(word) for word in words]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("postdate: ")
    assert output.err.count("\n") == 1
    assert sentence in output.err


def run_process(*words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """A command in a process of its own, with something to read."""
    command = [sys.executable, "-m", "postdate", *words]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=WAIT_S, check=False, env=environment())


# A shell starts what runs in its background with SIGINT ignored, and children inherit that: the tests may be such one.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from postdate.cli import main
sys.exit(main())
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def consumed(capsys: Capsys, topic: str, count: int, *flags: str) -> list[dict[str, Any]]:
    found = run_json(capsys, "consume", topic, "--group", "g", "--count", count, "--timeout", "30s", *flags)
    return [found] if count == 1 else found


# -- send -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_a_message_without_delay_is_there_at_once(capsys: Capsys) -> None:
    (line,) = run(capsys, "send", "orders", "hello")
    assert line.startswith("sent ")
    assert " to orders, queue " in line
    assert line.endswith(", offset 0")
    (message,) = consumed(capsys, "orders", 1)
    assert (message["body"], message["due_at_ms"], message["attempt"]) == ("hello", None, 1)


@pytest.mark.usefixtures("served")
def test_a_delayed_message_says_when_it_is_due_and_how_to_cancel_it(capsys: Capsys) -> None:
    _, due, handle = run(capsys, "send", "orders", "hello", "--delay", "30m")
    assert due.startswith(f"due 2023-11-14T22:43:20.000Z ({T0 + 30 * MINUTE_MS}), ")
    assert run(capsys, *handle.removeprefix("cancel it with: postdate ").split())[0].startswith("cancelled: ")


@pytest.mark.parametrize(
    ("flags", "delay_ms"),
    [
        (("--delay", "1h30m"), 90 * MINUTE_MS),
        (("--at", "2023-11-14T23:13:20Z"), HOUR_MS),
        (("--level", "5"), MINUTE_MS),
    ],
)
@pytest.mark.usefixtures("served")
def test_when_it_is_due_can_be_said_in_three_ways(capsys: Capsys, flags: tuple[str, ...], delay_ms: int) -> None:
    receipt = run_json(capsys, "send", "orders", "hello", *flags)
    assert receipt["due_at_ms"] == T0 + delay_ms
    assert receipt["queue_offset"] is None


def test_a_table_that_nobody_can_read_is_told(served: Served, capsys: Capsys) -> None:
    run(capsys, "send", "orders", "hello", "--count", 3, "--delay", "1h")
    assert run_json(capsys, "pending")["unread"] == ""

    def take() -> None:
        broker = served.broker
        epoch = broker.register_pipeline(T0)
        broker.flush()
        broker.stage(Stage(epoch.answer, (0, 3), (0, T0 + MINUTE_MS), (), 3, 0), T0)

    served.call(take)
    found = run_json(capsys, "pending", code=3)
    why = "no process is attached that can read the table; it has 3 rows of all topics: messages, and cancels"
    assert (found["total"], found["unread"]) == (0, why)
    for words, told in [
        (("pending",), ["nothing waits in memory and in the log"]),
        (("pending", "--topic", "orders"), ["nothing waits for orders in memory and in the log"]),
        (("forecast", "--span", "hour"), ["the next hour, by minute: at least 0 due"]),
    ]:
        assert cli.main(list(words)) == 3
        output = capsys.readouterr()
        assert output.out.splitlines() == told
        assert output.err == f"postdate: what waits in the table is not counted: {why}\n"
    assert run_json(capsys, "forecast", code=3)["day"]["unread"] == why
    run(capsys, "send", "orders", "hello", "--delay", "2s")
    assert cli.main(["pending"]) == 3
    assert capsys.readouterr().out.startswith("at least 1 message waits, ")


@pytest.mark.usefixtures("served")
def test_the_time_ahead_is_shown_as_bars(capsys: Capsys) -> None:
    assert run(capsys, "forecast", "--span", "hour") == ["the next hour, by minute: 0 due"]
    run(capsys, "send", "orders", "hello", "--count", 40, "--at", T0 + 5 * MINUTE_MS)
    run(capsys, "send", "orders", "hello", "--count", 1, "--at", T0 + 7 * MINUTE_MS)
    lines = run(capsys, "forecast", "--topic", "orders", "--span", "hour")
    assert lines[:3] == ["the next hour, by minute for orders: 41 due", "", lines[2]]
    assert lines[2].split() == ["minute", "due", "busiest", "second"]
    assert len(lines) == 3 + 60
    five, seven = lines[3 + 5], lines[3 + 7]
    assert (five.count("█"), seven.count("█")) == (40, 1)
    assert five.endswith("40 at " + moment(T0 + 5 * MINUTE_MS)[11:19])
    titles = [line for line in run(capsys, "forecast") if line.startswith("the next")]
    assert titles == [
        "the next hour, by minute: 41 due", "the next day, by hour: 41 due", "the next month, by day: 41 due",
    ]  # fmt: skip
    assert list(run_json(capsys, "forecast")) == ["hour", "day", "month"]


def test_key_tag_properties_and_the_body_of_a_file_arrive(served: Served, capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\xff\x00")
    flags = ("--key", "k", "--tag", "t", "--property", "a=1", "--property", "b=x=y", "--file", tmp_path / "body")
    sent = run_json(capsys, "send", "orders", *flags, "--at", T0 + 5)
    served.pass_ms(7)
    (message,) = consumed(capsys, "orders", 1)
    assert (message["key"], message["tag"], message["body_base64"]) == ("k", "t", "/wA=")
    assert (message["properties"]["a"], message["properties"]["b"]) == ("1", "x=y")
    assert (message["id"], message["due_at_ms"], message["stored_at_ms"]) == (sent["id"], T0 + 5, T0 + 7)


@pytest.mark.usefixtures("served")
def test_the_same_message_many_times(capsys: Capsys) -> None:
    lines = run(capsys, "send", "orders", "hello", "--count", 1_500, "--delay", "1h")
    assert lines[0] == "sent 1,500 messages to orders"
    assert lines[1] == f"due 2023-11-14T23:13:20.000Z ({T0 + HOUR_MS})"
    assert run_json(capsys, "pending")["total"] == 1_500


@pytest.mark.usefixtures("served")
def test_a_message_with_an_id_is_stored_once(capsys: Capsys) -> None:
    first = run(capsys, "send", "orders", "hello", "--once", "order-17", "--at", "2033-01-01T00:00:00Z")
    again = run(capsys, "send", "orders", "hello", "--once", "order-17")
    assert (again[0], again[2]) == (first[0], first[2]), "the line between says how long it waits"
    assert_refused(capsys, 3, "has another body under this id", "send", "orders", "other", "--once", "order-17")


@pytest.mark.usefixtures("served")
def test_a_message_for_each_line_that_is_not_empty(capsys: Capsys) -> None:
    done = run_process("send", "orders", "--lines", "--json", stdin=b"one\r\n\ntwo\nthree")
    assert (done.returncode, done.stderr) == (0, b"")
    ids = [json.loads(line)["id"] for line in done.stdout.splitlines()]
    messages = {message["id"]: message["body"] for message in consumed(capsys, "orders", 3)}
    assert [messages[each] for each in ids] == ["one", "two", "three"]


@pytest.mark.parametrize("words", [("-",), ("--file", "-")])
@pytest.mark.usefixtures("served")
def test_the_body_may_be_stdin(capsys: Capsys, words: tuple[str, ...]) -> None:
    assert run_process("send", "orders", *words, stdin=b"two\nlines\n").returncode == 0
    assert consumed(capsys, "orders", 1)[0]["body"] == "two\nlines\n"


@pytest.mark.usefixtures("served")
def test_no_message_is_no_error() -> None:
    assert run_process("send", "orders", "--lines").stdout == b"sent 0 messages to orders\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "give the body in one way: BODY, --file or --lines"),
        (("hello", "--lines"), "give the body in one way"),
        (("--file", "/no/such/file"), "/no/such/file cannot be read: No such file or directory"),
        (("hello", "--property", "KEYS=k"), "property KEYS: use the argument key"),
        (("hello", "--once", "a", "--count", "2"), "--once is the id of one message: leave out --lines and --count"),
        (("--lines", "--once", "a"), "--once is the id of one message"),
        (("hello", "--addr", "nonsense"), "the address is 'nonsense', expected host:port"),
    ],
)
@pytest.mark.usefixtures("served")
def test_a_send_that_makes_no_sense_is_refused(capsys: Capsys, words: tuple[str, ...], sentence: str) -> None:
    assert_refused(capsys, 2, sentence, "send", "orders", *words)


@pytest.mark.usefixtures("served")
def test_what_the_broker_refuses_is_told_in_its_words(capsys: Capsys) -> None:
    assert_refused(capsys, 3, "the limit is 315576000000 ms", "send", "orders", "x", "--delay", "4000d")
    assert_refused(capsys, 3, "topic 'no topic': expected", "send", "no topic", "x")
    assert_refused(capsys, 3, "the limit is", "send", "orders", "x", "--count", "2", "--delay", "4000d")


def test_a_topic_that_the_broker_does_not_make_is_told(tmp_path: Path, capsys: Capsys) -> None:
    with serving(tmp_path / "data", auto_create_topics=False) as served:
        assert_refused(capsys, 1, "topic orders does not exist", "send", "orders", "x", "--addr", served.address)


# -- consume ----------------------------------------------------------------------------------------------------


def test_a_line_says_where_when_how_late_and_what(served: Served, capsys: Capsys) -> None:
    run(capsys, "send", "orders", "hello", "--at", T0 + 5, "--key", "k", "--tag", "t")
    served.pass_ms(8)
    (line,) = run(capsys, "consume", "orders", "--group", "g", "--count", 1)
    assert line.startswith("2023-11-14T22:13:20.008Z  orders/")
    assert line.endswith('  offset 0  key k  tag t  3 ms after due  "hello"')


@pytest.mark.usefixtures("served")
def test_what_was_printed_is_acknowledged_and_the_rest_is_not(capsys: Capsys) -> None:
    run(capsys, "topic", "create", "orders", "--queues", 1)
    run(capsys, "send", "orders", "hello", "--count", 5)
    offsets = [message["queue_offset"] for message in consumed(capsys, "orders", 2)]
    offsets += [message["queue_offset"] for message in consumed(capsys, "orders", 3)]
    assert offsets == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("served")
def test_only_the_tags_that_are_asked_for(capsys: Capsys) -> None:
    for tag in ("red", "green", "blue"):
        run(capsys, "send", "orders", tag, "--tag", tag)
    assert {message["body"] for message in consumed(capsys, "orders", 2, "--tag", "red || blue")} == {"red", "blue"}


@pytest.mark.usefixtures("served")
def test_a_timeout_before_the_count_is_a_1(capsys: Capsys) -> None:
    words = ("consume", "orders", "--group", "g", "--timeout")
    assert run(capsys, *words, "50ms", code=1) == []
    run(capsys, "send", "orders", "hello")
    run(capsys, *words, "50ms", "--count", 2, code=1)


@pytest.mark.usefixtures("served")
def test_a_timeout_after_some_messages_is_the_end(capsys: Capsys) -> None:
    run(capsys, "send", "orders", "hello")
    assert len(run(capsys, "consume", "orders", "--group", "g", "--timeout", "3s")) == 1


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_and_keeps_what_was_printed(capsys: Capsys, number: int, code: int) -> None:
    run(capsys, "send", "orders", "hello")
    command = [sys.executable, "-c", INTERRUPTIBLE, "consume", "orders", "--group", "g"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout is not None
            assert b'"hello"' in process.stdout.readline()
            process.send_signal(number)
            assert process.communicate(timeout=WAIT_S) == (b"", b"")
            assert process.returncode == code
        finally:
            process.kill()  # or leaving the block would wait for it for ever
    assert run_json(capsys, "group", "show", "g")["queues"][-1]["lag"] == 0


# -- cancel -----------------------------------------------------------------------------------------------------


def test_a_cancel_tells_the_truth(served: Served, capsys: Capsys) -> None:
    handle = run_json(capsys, "send", "orders", "hello", "--delay", "10s")["handle"]
    served.pass_ms(10_000)
    assert run(capsys, "cancel", handle, code=1)[0].startswith("delivered: ")
    handle = run_json(capsys, "send", "orders", "hello", "--delay", "10s")["handle"]
    assert run_json(capsys, "cancel", handle) == {"outcome": "cancelled"}


@pytest.mark.usefixtures("served")
def test_a_cancel_by_topic_key_and_due(capsys: Capsys) -> None:
    run(capsys, "send", "orders", "hello", "--delay", "1h", "--key", "order-17")
    words = ("cancel", "--topic", "orders", "--key", "order-17", "--due")
    assert run(capsys, *words, T0 + HOUR_MS + 1, code=1)[0].startswith("unknown: ")
    assert run(capsys, *words, "2023-11-14T23:13:20Z")[0].startswith("cancelled: ")
    assert run_json(capsys, "pending")["total"] == 0


def test_a_cancel_by_key_says_of_each_message_what_became_of_it(served: Served, capsys: Capsys) -> None:
    out = run_json(capsys, "send", "orders", "out", "--key", "k", "--delay", "1s")["id"]
    served.pass_ms(1_000)
    served.settle()
    waits = [run_json(capsys, "send", "orders", "x", "--key", "k", "--delay", "1h")["id"] for _ in range(2)]
    words = ("cancel", "--topic", "orders", "--key", "k")
    assert_refused(capsys, 3, "2 messages with this key wait, and only one was expected", *words, "--only")
    assert run(capsys, *words) == [
        f"{out}  delivered, it was due 2023-11-14T22:13:21.000Z ({T0 + 1_000})",
        *[f"{each}  cancelled, it was due 2023-11-14T23:13:21.000Z ({T0 + 1_000 + HOUR_MS})" for each in waits],
    ]
    assert run_json(capsys, *words)[1] == {
        "id": waits[0], "outcome": "cancelled", "due_at_ms": T0 + 1_000 + HOUR_MS,
    }  # fmt: skip
    run(capsys, "send", "orders", "out", "--key", "visible")
    assert run(capsys, "cancel", "--topic", "orders", "--key", "visible", code=1)[0].endswith("  delivered")
    assert_refused(
        capsys, 1, "no message of topic 'orders' has the key 'n'", "cancel", "--topic", "orders", "--key", "n"
    )
    assert_refused(capsys, 1, "topic 'nowhere' does not exist", "cancel", "--topic", "nowhere", "--key", "n")


@pytest.mark.parametrize("command", ["cancel", "deliver", "postpone --by 1h"])
@pytest.mark.parametrize("words", ["", "handle --key k", "--topic t", "--key k", "handle --topic t --key k"])
@pytest.mark.usefixtures("served")
def test_messages_are_named_by_a_handle_or_by_topic_and_key(capsys: Capsys, command: str, words: str) -> None:
    assert_refused(capsys, 2, "give either a handle, or --topic and --key", *command.split(), *words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("cancel handle --only", "--only is for --topic and --key"),
        ("cancel --topic t --key k --due 1798790400000 --only", "--due names one message"),
        ("cancel handle --due 1798790400000", "--due names one message"),
        ("cancel handle --where true", "give either --where, or a handle"),
        ("cancel handle --dry-run", "--dry-run is for --where and --keys, --id and --no-wait for --where"),
        ("postpone handle --by 1h --where true", "give either --where, or a handle"),
        ("postpone --where true --delay 1h", "--where goes with --by"),
        ("postpone --where true --by=-1h", "--where goes with --by"),
        ("postpone handle --by 0s", "--by 0 changes nothing"),
        ("postpone handle --by 1h --id x", "--dry-run is for --where and --keys, --id and --no-wait for --where"),
        ("postpone handle --by 1h", "is neither a receipt nor a recall handle"),
        ("deliver handle", "is neither a receipt nor a recall handle"),
    ],
)
@pytest.mark.usefixtures("served")
def test_flags_that_contradict_each_other_are_refused(capsys: Capsys, words: str, sentence: str) -> None:
    assert_refused(capsys, 2, sentence, *words.split())


@pytest.mark.parametrize("words", ["postpone handle", "postpone handle --by 1h --delay 1h", "postpone handle --at now"])
def test_a_postponement_needs_one_time(words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())


@pytest.mark.usefixtures("served")
def test_a_handle_that_nobody_gave_is_refused(capsys: Capsys) -> None:
    assert_refused(capsys, 2, "is neither a receipt nor a recall handle", "cancel", "handle")


# -- postpone and deliver ---------------------------------------------------------------------------------------


def test_a_message_is_postponed_by_its_handle(served: Served, capsys: Capsys) -> None:
    handle = run_json(capsys, "send", "orders", "hello", "--delay", "1h")["handle"]
    was = f"2023-11-14T23:13:20.000Z ({T0 + HOUR_MS})"
    later = f"2023-11-15T01:13:20.000Z ({T0 + 3 * HOUR_MS})"
    assert run(capsys, "postpone", handle, "--by", "2h") == [f"moved: it is due {later}, and was due {was}"]
    moved = run_json(capsys, "postpone", handle, "--by=-2h30m")
    assert (moved["outcome"], moved["due_at_ms"], moved["was_due_at_ms"]) == (
        "moved", T0 + 30 * MINUTE_MS, T0 + 3 * HOUR_MS,
    )  # fmt: skip
    run(capsys, "postpone", moved["handle"], "--at", T0 + 5_000)
    served.pass_ms(5_000)
    served.settle()
    assert run(capsys, "postpone", handle, "--delay", "1h", code=1) == ["delivered: the message was out before"]
    other = run_json(capsys, "send", "orders", "hello", "--delay", "1h")["handle"]
    run(capsys, "cancel", other)
    unknown = ["unknown: no such message waits; nothing was changed"]
    assert run(capsys, "postpone", other, "--delay", "1h", code=1) == unknown
    assert run(capsys, "deliver", other, code=1) == unknown


@pytest.mark.usefixtures("served")
def test_messages_of_a_key_are_postponed_and_delivered(capsys: Capsys) -> None:
    ids = [run_json(capsys, "send", "orders", "hello", "--delay", "1h", "--key", "k")["id"] for _ in range(2)]
    words = ("--topic", "orders", "--key", "k")
    assert_refused(capsys, 3, "only one was expected", "postpone", *words, "--delay", "2h", "--only")
    moved = run_json(capsys, "postpone", *words, "--delay", "2h")
    assert sorted(each["id"] for each in moved) == sorted(ids)
    out = run(capsys, "deliver", *words)
    assert sorted(line.split()[0] for line in out) == sorted(ids)
    was = f"2023-11-15T00:13:20.000Z ({T0 + 2 * HOUR_MS})"
    assert {line.partition("  ")[2] for line in out} == {f"moved: it is out now, and was due {was}"}
    assert {each["outcome"] for each in run_json(capsys, "deliver", *words, code=1)} == {"delivered"}
    nothing = "no message of topic 'orders' with the key 'n' waits or was delivered"
    assert_refused(capsys, 1, nothing, "deliver", "--topic", "orders", "--key", "n")
    cancelled = run_json(capsys, "send", "orders", "hello", "--delay", "1h", "--key", "n")
    run(capsys, "cancel", cancelled["handle"])
    assert_refused(capsys, 1, nothing, "postpone", "--topic", "orders", "--key", "n", "--delay", "1h")


# -- find -------------------------------------------------------------------------------------------------------


def test_find_says_where_messages_are(served: Served, capsys: Capsys) -> None:
    def send(body: str, *flags: str) -> str:
        return str(run_json(capsys, "send", "orders", body, "--key", "k", *flags)["id"])

    visible, waits = send("visible"), send("waits", "--delay", "1h")
    cancelled = run_json(capsys, "send", "orders", "cancelled", "--key", "k", "--delay", "2h")
    run(capsys, "cancel", cancelled["handle"])
    lines = run(capsys, "find", "orders", "k")
    assert lines[0] == f'{cancelled["id"]}  cancelled  "cancelled"'
    assert lines[1] == f'{waits}  waiting until 2023-11-14T23:13:20.000Z ({T0 + HOUR_MS}) in the log  "waits"'
    assert lines[2].startswith(f"{visible}  visible in queue ")
    assert lines[2].endswith(f' at offset 0 since 2023-11-14T22:13:20.000Z ({T0})  "visible"')
    found = run_json(capsys, "find", "orders", waits)
    assert (found["state"], found["place"], found["due_at_ms"], found["queue_offset"], found["body"]) == (
        "waiting", "log", T0 + HOUR_MS, -1, "waits",
    )  # fmt: skip
    assert len(run_json(capsys, "find", "orders", "k", "--limit", 2)) == 2
    served.call(lambda: served.broker.delete_topic("orders", T0))
    served.call(lambda: served.broker.put_topic("orders", T0))
    assert "deleted with its topic" in run(capsys, "find", "orders", waits)[0]


def test_find_says_why_the_table_was_not_asked(served: Served, capsys: Capsys) -> None:
    waits = run_json(capsys, "send", "orders", "waits", "--delay", "1h", "--key", "k")["id"]

    def take() -> None:
        epoch = served.broker.register_pipeline(T0)
        served.broker.flush()
        served.broker.stage(Stage(epoch.answer, (0, 1), (0, T0 + MINUTE_MS), (), 1, 0), T0)

    served.call(take)
    said = "postdate: the table cannot be asked, and may have more: no process is attached that can read the table\n"
    for key, shown in (("k", [waits]), ("nobody", [])):
        assert cli.main(["find", "orders", key]) == 3
        output = capsys.readouterr()
        assert [line.split()[0] for line in output.out.splitlines()] == shown
        assert output.err == said
    words = ("--topic", "orders", "--key", "k", "--timeout", "100ms")
    for command in (("cancel",), ("deliver",), ("postpone", "--by", "1h")):
        assert_refused(capsys, 3, "nothing was changed, as the table cannot be asked", *command, *words)


@pytest.mark.usefixtures("served")
def test_find_without_a_match_says_so(capsys: Capsys) -> None:
    run(capsys, "topic", "create", "orders")
    assert_refused(capsys, 1, "no message of topic 'orders' has the key 'nobody'", "find", "orders", "nobody")
    assert_refused(capsys, 1, "topic 'nowhere' does not exist", "find", "nowhere", "k")


# -- pending ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_nothing_waits(capsys: Capsys) -> None:
    assert run(capsys, "pending") == ["nothing waits"]
    run(capsys, "topic", "create", "orders")
    assert run(capsys, "pending", "--topic", "orders") == ["nothing waits for orders"]
    assert_refused(capsys, 1, "topic 'letters' does not exist", "pending", "--topic", "letters")


@pytest.mark.usefixtures("served")
def test_what_waits_by_topic_and_by_time(capsys: Capsys) -> None:
    run(capsys, "send", "orders", "soon", "--delay", "10s")
    run(capsys, "send", "orders", "later", "--delay", "2h", "--count", 1_000)
    run(capsys, "send", "letters", "much later", "--at", "2024-01-01T00:00Z")
    lines = run(capsys, "pending", "--by", "hour")
    assert re.fullmatch(r"1,002 messages wait, \d+\.\d KB", lines[0])
    assert [" ".join(re.sub(r" +[\d.]+ (bytes|KB)$", "", line).split()) for line in lines[1:]] == [
        "",
        "topic near far table bytes",
        "letters 0 1 0",
        "orders 1 1,000 0",
        "",
        "due in the hour topic messages bytes",
        "2023-11-14T22Z orders 1",
        "2023-11-15T00Z orders 1,000",
        "2024-01-01T00Z letters 1",
    ]
    *_, last = run(capsys, "pending", "--by", "day", "--limit", 1)
    assert last == "... and more: see --limit and --by"
    shown = run(capsys, "pending", "--by", "day", "--topic", "letters")
    assert any(line.startswith("2024-01-01      letters         1  ") for line in shown)


# -- topic ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_a_topic_from_birth_to_death(capsys: Capsys) -> None:
    assert run(capsys, "topic", "list") == ["there is no topic yet; the first send to one makes it"]
    made = run(capsys, "topic", "create", "orders", "--queues", 2)
    assert made == ["created topic orders: 2 queues, read and write"]
    assert_refused(capsys, 1, "there is a topic orders already", "topic", "create", "orders")
    run(capsys, "send", "orders", "now")
    run(capsys, "send", "orders", "later", "--delay", "1h", "--count", 3)
    assert run(capsys, "topic", "list") == ["topic   waiting", "orders        3"]
    shown = run(capsys, "topic", "show", "orders")
    assert shown[:4] == [
        "topic    orders",
        "queues   2",
        "perm     read and write",
        "waiting  3 (0 near, 3 far)",
    ]
    assert shown[5] == "queue  min  max  messages"
    assert len(shown) == 8
    changed = run(capsys, "topic", "update", "orders", "--perm", "r")
    assert changed == ["updated topic orders: 2 queues, read only"]
    assert_refused(capsys, 3, "no queue that can be written to", "send", "orders", "x")
    assert run(capsys, "topic", "update", "orders", "--queues", 4)[0].endswith("4 queues, read only")
    deleted = run(capsys, "topic", "delete", "orders", "--yes")
    assert deleted == ["deleted topic orders; 3 waiting messages cancelled"]
    assert run_json(capsys, "topic", "list") == []


@pytest.mark.usefixtures("served")
def test_a_topic_as_json(capsys: Capsys) -> None:
    wanted = {"name": "orders", "read_queue_count": 1, "write_queue_count": 1, "perm": 4}
    assert run_json(capsys, "topic", "create", "orders", "--queues", 1, "--perm", "r") == wanted
    queues = [{"queue_id": 0, "min_offset": 0, "max_offset": 0}]
    assert run_json(capsys, "topic", "show", "orders") == {**wanted, "near": 0, "far": 0, "queues": queues}
    assert run_json(capsys, "topic", "list") == [{"topic": "orders", "waiting": 0}]
    assert run_json(capsys, "topic", "delete", "orders", "--yes") == {"topic": "orders", "cancelled": 0}


@pytest.mark.parametrize("words", [("show",), ("update", "--perm", "r"), ("delete", "--yes")])
@pytest.mark.parametrize("name", ["orders", "TBW102"])
@pytest.mark.usefixtures("served")
def test_a_topic_that_is_not_there_is_a_1(capsys: Capsys, words: tuple[str, ...], name: str) -> None:
    verb, *flags = words
    assert_refused(capsys, 1, f"topic '{name}' does not exist", "topic", verb, name, *flags)


@pytest.mark.usefixtures("served")
def test_an_update_without_a_change_makes_no_sense(capsys: Capsys) -> None:
    assert_refused(capsys, 2, "nothing to change: give --queues or --perm", "topic", "update", "orders")


@pytest.mark.parametrize("noun", ["topic", "group"])
@pytest.mark.usefixtures("served")
def test_nothing_is_deleted_without_a_yes(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, noun: str) -> None:
    run(capsys, noun, "create", "orders")
    assert_refused(capsys, 2, "give --yes if you mean it", noun, "delete", "orders")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    answers = iter(["n", "", "y"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert_refused(capsys, 1, "nothing was deleted", noun, "delete", "orders")
    assert_refused(capsys, 1, "nothing was deleted", noun, "delete", "orders")
    assert run(capsys, noun, "delete", "orders")[0].startswith(f"deleted {noun} orders")


# -- group ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_a_group_from_birth_to_death(capsys: Capsys) -> None:
    assert run(capsys, "group", "list") == ["there is no group yet; the first consumer of one makes it"]
    assert run(capsys, "group", "create", "g") == ["created group g"]
    assert_refused(capsys, 1, "there is a group g already", "group", "create", "g")
    run(capsys, "topic", "create", "orders", "--queues", 1)
    run(capsys, "send", "orders", "hello", "--count", 3)
    consumed(capsys, "orders", 2)
    assert run(capsys, "group", "list") == ["g"]
    shown = run(capsys, "group", "show", "g")
    assert shown[:3] == ["group    g", "members  none at this moment", "lag      1"]
    assert shown[-1].split() == ["orders", "0", "2", "3", "0", "1"]
    queue = run_json(capsys, "group", "show", "g")["queues"][-1]
    assert queue == {"topic": "orders", "queue_id": 0, "committed": 2, "max_offset": 3, "leased": 0, "lag": 1}
    assert run(capsys, "group", "delete", "g", "--yes") == ["deleted group g"]
    assert run_json(capsys, "group", "list") == []


@pytest.mark.usefixtures("served")
def test_a_group_has_delays_and_attempts_of_its_own(capsys: Capsys) -> None:
    run(capsys, "group", "create", "g", "--retry", "10s,1m,10m", "--attempts", 5)
    assert "retry    5 attempts, after 10 s, 1 min, 10 min" in run(capsys, "group", "show", "g")
    assert run(capsys, "group", "update", "g", "--attempts", 1) == ["updated group g"]
    shown = run_json(capsys, "group", "show", "g")
    assert (shown["retry_delays_ms"], shown["attempts"]) == ([10_000, 60_000, 600_000], 1)
    run(capsys, "group", "update", "g", "--retry", "default")
    assert "retry    1 attempt, after the delays of the broker" in run(capsys, "group", "show", "g")
    assert_refused(capsys, 2, "give --retry, --attempts or --in-order", "group", "update", "g")
    assert_refused(capsys, 1, "there is no group h", "group", "update", "h", "--attempts", 2)
    assert_refused(capsys, 3, "retryDelaysMs of group 'g' has", "group", "update", "g", "--retry", "1s,900d")


@pytest.mark.usefixtures("served")
def test_a_group_may_want_the_messages_of_a_queue_in_order(capsys: Capsys) -> None:
    run(capsys, "group", "create", "g", "--in-order", "yes")
    assert "order    the messages of a queue come in order" in run(capsys, "group", "show", "g")
    run(capsys, "group", "update", "g", "--attempts", 1)
    assert run_json(capsys, "group", "show", "g")["in_order"] is True
    run(capsys, "group", "update", "g", "--in-order", "no")
    assert run_json(capsys, "group", "show", "g")["in_order"] is False
    assert not [line for line in run(capsys, "group", "show", "g") if line.startswith("order")]


@pytest.mark.usefixtures("served")
def test_the_lag_of_a_group_counts_queues_that_it_has_not_committed(capsys: Capsys) -> None:
    run(capsys, "topic", "create", "orders", "--queues", 3)
    run(capsys, "send", "orders", "hello", "--count", 9)
    consumed(capsys, "orders", 1)
    shown = run_json(capsys, "group", "show", "g")
    queues = [queue for queue in shown["queues"] if queue["topic"] == "orders"]
    assert [queue["queue_id"] for queue in queues] == [0, 1, 2]
    assert sum(queue["lag"] for queue in queues) == 8


@pytest.mark.usefixtures("served")
def test_a_group_that_is_not_there_is_a_1(capsys: Capsys) -> None:
    assert_refused(capsys, 1, "group 'g' does not exist", "group", "show", "g")
    assert_refused(capsys, 1, "group 'g' does not exist", "group", "delete", "g", "--yes")


# -- no broker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("send", "orders", "x", "--timeout", "300ms"),
        ("send", "orders", "x", "--count", "2", "--timeout", "300ms"),
        ("consume", "orders", "--group", "g"),
        ("cancel", "--topic", "t", "--key", "k", "--due", "1798790400000", "--timeout", "300ms"),
        ("pending",),
        ("cancel", "--topic", "t", "--key", "k", "--timeout", "300ms"),
        ("deliver", "--topic", "t", "--key", "k", "--timeout", "300ms"),
        ("postpone", "--topic", "t", "--key", "k", "--by", "1h", "--timeout", "300ms"),
        ("find", "orders", "key"),
        ("topic", "list"),
        ("group", "list"),
    ],
    ids=" ".join,
)
def test_no_broker_is_a_3(capsys: Capsys, words: tuple[str, ...]) -> None:
    # Nothing listens on port 1, and nothing may.
    assert_refused(capsys, 3, "no broker at 127.0.0.1:1", *words, "--addr", "127.0.0.1:1")


def test_the_first_address_that_answers_is_asked(served: Served, capsys: Capsys) -> None:
    assert run(capsys, "pending", "--addr", f"127.0.0.1:1;{served.address}") == ["nothing waits"]


def test_a_key_with_a_space_is_refused_and_several_keys_are_given_one_by_one(served: Served, capsys: Capsys) -> None:
    assert_refused(
        capsys, 2, "RocketMQ separates keys by spaces", "send", "orders", "x", "--key", "order 17", "--addr",
        served.address,
    )  # fmt: skip
    run(capsys, "send", "orders", "x", "--key", "order-17", "--key", "customer-4", "--addr", served.address)
    for key in ("order-17", "customer-4"):
        assert len(run(capsys, "find", "orders", key, "--json", "--addr", served.address)) == 1


# -- dead letters and resets --------------------------------------------------------------------------------------


def bury(served: Served, number: int, reason: str) -> None:
    properties = {
        "UNIQ_KEY": f"ID{number}", "KEYS": f"order-{number}", "RETRY_TOPIC": "orders", "POSTDATE_REASON": reason,
        "POSTDATE_ORIGIN": f"orders/0/{number}",
    }  # fmt: skip
    with connected(served) as peer:
        make_topic(peer, "%DLQ%billing")
        sent(peer, "%DLQ%billing", f"letter {number}", fields={"j": 3}, **properties)


def test_dead_letters_are_listed_shown_resent_and_deleted(served: Served, capsys: Capsys) -> None:
    address = ("--addr", served.address)
    for number, reason in enumerate(("TimeoutError: no answer\nTraceback", "ValueError: no bill", "TimeoutError")):
        bury(served, number, reason)
    head, *rows = run(capsys, "dead", "list", "billing", *address)
    assert head.split() == ["id", "topic", "key", "dead", "since", "attempts", "reason"]
    assert [row.split()[0] for row in rows] == ["ID0", "ID1", "ID2"]
    assert rows[0].endswith("TimeoutError: no answer")
    found = [json.loads(line) for line in run(capsys, "dead", "list", "billing", "--reason", "no", "--json", *address)]
    assert [(each["id"], each["attempts"], each["origin"]) for each in found] == [
        ("ID0", 3, "orders/0/0"),
        ("ID1", 3, "orders/0/1"),
    ]
    shown = run(capsys, "dead", "show", "billing", "ID1", *address)
    assert ["reason", "ValueError:", "no", "bill"] in [line.split() for line in shown]
    assert run(capsys, "dead", "list", "billing", "--limit", "1", *address)[-1] == "and more: --limit 2 shows them"

    assert_refused(capsys, 2, "give --yes if you mean it", "dead", "resend", "billing", "ID0", *address)
    assert_refused(capsys, 2, "say which letters", "dead", "delete", "billing", "--yes", *address)
    assert_refused(capsys, 2, "say which letters", "dead", "delete", "billing", "ID0", "--all", "--yes", *address)
    assert_refused(capsys, 1, "has no dead letter ID9", "dead", "resend", "billing", "ID0", "ID9", "--yes", *address)
    assert_refused(capsys, 1, "group 'nobody' does not exist", "dead", "list", "nobody", *address)

    assert run(capsys, "dead", "resend", "billing", "--reason", "timeout", "--yes", *address) == [
        "resent 2 dead letters of group billing"
    ]
    assert len(run(capsys, "find", "orders", "order-2", *address)) == 1
    assert run(capsys, "dead", "delete", "billing", "--all", "--yes", "--json", *address) == [
        '{"group": "billing", "deleted": 1}'
    ]
    assert run(capsys, "dead", "list", "billing", *address) == ["no dead letters"]
    assert_refused(capsys, 1, "has no such dead letter", "dead", "delete", "billing", "--all", "--yes", *address)


def open_half(served: Served, number: int, topic: str = "orders") -> None:
    properties: dict[str, Any] = {
        "UNIQ_KEY": f"ID{number}", "KEYS": f"order-{number}", "TRAN_MSG": "true", "PGROUP": "billing",
    }  # fmt: skip
    with connected(served) as peer:
        make_topic(peer, topic)
        sent(peer, topic, f"half {number}", sys_flag=4, **properties)


def test_transactions_are_listed_shown_committed_and_rolled_back(served: Served, capsys: Capsys) -> None:
    address = ("--addr", served.address)
    assert run(capsys, "transaction", "list", *address) == ["no transactions are open"]
    for number in range(3):
        open_half(served, number, "other" if number == 1 else "orders")
    head, *rows = run(capsys, "transaction", "list", *address)
    assert head.split() == ["id", "topic", "group", "message", "since", "checks", "next", "check"]
    ids = [row.split()[0] for row in rows]
    assert [row.split()[1:4] for row in rows] == [
        ["orders", "billing", "ID0"], ["other", "billing", "ID1"], ["orders", "billing", "ID2"],
    ]  # fmt: skip
    assert run(capsys, "transaction", "list", "--limit", "1", *address)[-1] == "and more: --limit 2 shows them"
    assert run(capsys, "transaction", "list", "--given-up", *address) == ["no transactions are given up"]
    (other,) = [json.loads(line) for line in run(capsys, "transaction", "list", "--topic", "other", "--json", *address)]
    assert (other["id"], other["messageId"], other["checks"], other["givenUp"]) == (ids[1], "ID1", 0, 0)
    shown = [line.split() for line in run(capsys, "transaction", "show", ids[0], *address)]
    assert ["message", "ID0"] in shown
    assert ["body", '"half', '0"'] in shown
    assert "the half of a transaction that is open" in run(capsys, "find", "orders", "ID0", *address)[0]

    assert_refused(capsys, 2, "cannot be taken back: give --yes", "transaction", "commit", ids[0], *address)
    assert run(capsys, "transaction", "commit", ids[0], "--yes", *address) == ["the transaction was committed"]
    assert run(capsys, "transaction", "commit", ids[0], "--yes", *address) == ["the transaction was committed before"]
    ended = run_json(capsys, "transaction", "rollback", ids[0], "--yes", *address, code=1)
    assert ended == {"id": ids[0], "outcome": "already_committed"}
    assert run(capsys, "transaction", "rollback", ids[1], "--yes", *address) == ["the transaction was rolled back"]
    assert_refused(capsys, 1, "the transaction was rolled back before", "transaction", "show", ids[1], *address)
    assert_refused(capsys, 1, "is not known, or not any more", "transaction", "show", "0" * 32, *address)
    assert_refused(capsys, 3, "expected 32 hex digits", "transaction", "show", "ID2", *address)
    assert [message["body"] for message in consumed(capsys, "orders", 1, *address)] == ["half 0"]


def test_a_group_is_reset_after_a_preview(served: Served, capsys: Capsys) -> None:
    address = ("--addr", served.address)
    with connected(served) as peer:
        make_topic(peer, "orders")
        for number in range(3):
            sent(peer, "orders", f"order {number}")
    run(capsys, "consume", "orders", "--group", "billing", "--count", "2", *address)
    reset = ("group", "reset", "billing", *address)
    head, row, summary, end = run(capsys, *reset, "--to", "earliest", "--dry-run")
    assert head.split() == ["topic", "queue", "from", "to", "again", "skipped", "in", "work"]
    assert row.split() == ["orders", "0", "2", "0", "2", "0", "0"]
    assert summary == "2 messages to be delivered again, 0 messages to be skipped"
    assert end == "nothing was moved"
    assert_refused(capsys, 2, "a reset may skip messages: give --yes", *reset, "--to", "latest")
    with pytest.raises(SystemExit):
        cli.main([*reset, "--to", "yesterday", "--yes"])
    assert "'yesterday', expected a time such as" in capsys.readouterr().err
    assert run(capsys, *reset, "--to", "latest", "--yes")[-2:] == [
        "0 messages to be delivered again, 1 message to be skipped",
        "moved group billing",
    ]
    moved = run_json(capsys, *reset, "--to", str(10**12), "--topic", "orders", "--yes", "--json")
    assert (moved["moved"], moved["queues"][0]["again"]) == (True, 3)
