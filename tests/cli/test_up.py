"""`postdate up` as a real process: what it says, how it stops, why it does not start."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate import __version__, cli
from postdate.access.rules import User
from postdate.access.token import TOKEN_FILE, read_token
from postdate.access.users import Users, with_user
from postdate.check import check_folder
from postdate.spark.executor.broker_client import BrokerClient
from postdate.storage.disk import RealDisk
from postdate.tls import CERTIFICATE_FILE, KEY_FILE
from tests.support.certificates import Authority, Pair
from tests.support.files import open_to_others

WAIT_S = 30
FREE_PORTS = ("--route-port", "0", "--broker-port", "0", "--vip-port", "0", "--grpc-port", "-1", "--bulk-port", "-1")
SMALL_FILES = ("--segment-bytes", "64KiB", "--batch-bytes-max", "64KiB")

Start = Callable[..., "subprocess.Popen[str]"]


def environment(**variables: str) -> dict[str, str]:
    """Ours, without settings that whoever runs the tests may have."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
    return own | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `postdate up` in the test's folder; at the end whatever still runs is ended, and the folder checked."""
    processes: list[subprocess.Popen[str]] = []

    def start_up(*flags: str, **variables: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "postdate", "up", *flags]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(**variables), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start_up
    for process in processes:
        process.kill()
        process.communicate(timeout=WAIT_S)
    if (tmp_path / "postdate-data" / "FORMAT").exists():
        assert check_folder(RealDisk(tmp_path / "postdate-data")).findings == []


def ready(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What a process with --json says when it serves."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=WAIT_S)[1]
    found: dict[str, Any] = json.loads(line)
    return found


def ended(process: "subprocess.Popen[str]", number: signal.Signals | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends, by a signal where one is given."""
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def assert_refused(process: "subprocess.Popen[str]", *sentences: str) -> None:
    """Exit code 2 and one sentence on stderr."""
    code, out, err = ended(process)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    for sentence in ("postdate: ", *sentences):
        assert sentence in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_and_how_to_go_on_and_stops_when_asked(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(*FREE_PORTS, *SMALL_FILES)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(10)]
    text = "".join(lines)
    assert lines[0] == f"postdate {__version__}\n"
    assert f"data      {tmp_path / 'postdate-data'}, flush sync\n" in text
    assert "waiting   0 messages\n" in text
    address = lines[1].split()[1]
    assert f'  postdate send orders "hello" --delay 5s --addr {address}\n' in text
    assert lines[-1] == "Ctrl-C stops the broker.\n"
    host, _, port = address.partition(":")
    socket.create_connection((host, int(port)), WAIT_S).close()
    assert ended(process, number) == (0, "stopped; what waits is on disk\n", "")


def test_json_for_a_program_that_starts_it(start: Start, tmp_path: Path) -> None:
    process = start(*FREE_PORTS, *SMALL_FILES, "--vip-port", "-1", "--json")
    said = ready(process)
    assert (said["vip"], said["data"], said["waiting"]) == (None, str(tmp_path / "postdate-data"), 0)
    assert ended(process, signal.SIGTERM) == (0, '{"stopped": true}\n', "")


def test_settings_come_from_file_environment_and_flags(start: Start, tmp_path: Path) -> None:
    (tmp_path / "postdate.toml").write_text('data = "a"\nflush = "async"\nroute_port = 1')
    process = start(*FREE_PORTS, *SMALL_FILES, "--json", POSTDATE_DATA="b", POSTDATE_ROUTE_PORT="1")
    said = ready(process)
    assert (said["data"], said["flush"]) == (str(tmp_path / "b"), "async")
    assert ended(process, signal.SIGTERM)[0] == 0


def test_what_waits_is_there_after_a_restart(start: Start) -> None:
    first = start(*FREE_PORTS, *SMALL_FILES, "--json")
    assert cli.main(["send", "orders", "hello", "--delay", "1h", "--addr", ready(first)["route"]]) == 0
    assert ended(first, signal.SIGTERM)[0] == 0
    second = start(*FREE_PORTS, "--json")
    assert ready(second)["waiting"] == 1
    assert ended(second, signal.SIGTERM)[0] == 0


def test_a_second_one_on_the_same_folder_is_refused(start: Start) -> None:
    first = start(*FREE_PORTS, *SMALL_FILES, "--json")
    ready(first)
    assert_refused(start(*FREE_PORTS), f"postdate-data is in use by process {first.pid}")
    assert ended(first, signal.SIGTERM)[0] == 0


def test_a_port_in_use_is_named_with_its_flag(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refused = start(*FREE_PORTS, *SMALL_FILES, "--route-port", port)
        assert_refused(refused, f"port {port}", "in use by another program: choose another with --route-port")


def test_a_foreign_folder_is_named_and_left_alone(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert_refused(start("--data", "home"), "home: the folder holds 'notes.txt'")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("flags", "variables", "sentence"),
    [
        (("--flush", "never"), {}, "--flush is 'never', expected one of sync, async"),
        ((), {"POSTDATE_LEAD_MS": "5"}, "environment POSTDATE_LEAD_MS is 5, expected 100 to 3600000"),
        (("--config", "no.toml"), {}, "the settings file no.toml cannot be read"),
        ((), {"POSTDATE_CONFIG": "no.toml"}, "the settings file no.toml cannot be read"),
        (("--message-delay-level", "soon"), {}, "delay level 'soon'"),
        (("--host", "192.0.2.1", "--insecure", "true"), {}, "cannot listen on port"),
        (("--tls", "permissive"), {}, "tls.crt (certificate) cannot be read: No such file or directory"),
        (("--tls", "yes", "--tls-cert", "c.pem"), {}, "tls_cert and tls_key belong together"),
        (("--tls-client-cert", "required"), {}, "tls_client_cert is required, and tls_client_ca names no file"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(
    start: Start, flags: tuple[str, ...], variables: dict[str, str], sentence: str
) -> None:
    assert_refused(start(*SMALL_FILES, *FREE_PORTS, *flags, **variables), sentence)


# -- on a network


OPEN = ("--host", "0.0.0.0")


def add_users(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Users(folder).change(with_user(User("admin", "wonderland", is_super=True)))


def add_certificate(folder: Path, name: str) -> Pair:
    pair = Authority(folder.parent / "authority").sign(name)
    folder.mkdir(exist_ok=True)
    shutil.copy(pair.certificate, folder / CERTIFICATE_FILE)
    shutil.copy(pair.key, folder / KEY_FILE)
    return pair


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "broker.example.org"])
def test_a_broker_that_others_reach_is_refused_without_users_and_tls(start: Start, tmp_path: Path, host: str) -> None:
    refused = start(*FREE_PORTS, *SMALL_FILES, "--host", host)
    assert_refused(
        refused, f"other machines reach {host}, and this broker has neither users nor TLS: run postdate user init "
        "--self-signed --data postdate-data and then postdate up "
        f"--host {host} --tls enforcing --data postdate-data, or give --insecure true",
    )  # fmt: skip
    assert not (tmp_path / "postdate-data").exists()


def test_users_or_tls_alone_are_not_enough(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "postdate-data"
    add_certificate(data, "server")
    assert_refused(start(*FREE_PORTS, *OPEN, "--tls", "enforcing"), "has no users: run postdate user init --data")
    add_users(data)
    data.joinpath("tls.crt").rename(tmp_path / "kept.crt")
    assert_refused(
        start(*FREE_PORTS, *OPEN), "this broker has no TLS: run postdate user init --self-signed --data postdate-data"
    )
    (tmp_path / "kept.crt").rename(data / "tls.crt")
    assert_refused(start(*FREE_PORTS, *OPEN), "this broker has no TLS: run postdate up --host 0.0.0.0 --tls enforcing")


def test_an_operator_may_know_better(start: Start) -> None:
    process = start(*FREE_PORTS, *SMALL_FILES, *OPEN, "--insecure", "true", "--json")
    assert ready(process)["broker"].startswith("0.0.0.0:")
    assert ended(process, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_this_machine_needs_neither(start: Start, host: str) -> None:
    process = start(*FREE_PORTS, *SMALL_FILES, "--host", host, "--json")
    ready(process)
    assert ended(process, signal.SIGTERM)[0] == 0


def test_a_broker_with_users_and_tls_serves_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its certificate in the data folder. Its own processes have a socket there, which needs none."""
    data = tmp_path / "postdate-data"
    pair = add_certificate(data, "server")
    add_users(data)
    bulk = ("--bulk-port", "0", "--pipeline", "none")
    process = start(*FREE_PORTS, *SMALL_FILES, *OPEN, *bulk, "--tls", "enforcing", "--json")
    said = ready(process)
    port = said["route"].rpartition(":")[2]
    monkeypatch.setenv("POSTDATE_CA_FILE", pair.ca)
    send = ["send", "orders", "hello", "--delay", "1h", "--addr", f"127.0.0.1:{port}"]
    assert cli.main(send) == 3
    monkeypatch.setenv("POSTDATE_ACCESS_KEY", "admin")
    monkeypatch.setenv("POSTDATE_SECRET_KEY", "wonderland")
    assert cli.main(send) == 0
    monkeypatch.setenv("POSTDATE_TLS", "0")
    own = BrokerClient(f"unix:{data / 'broker.sock'}", token=read_token(data / TOKEN_FILE))
    while not own.state().bulk:  # bulk attaches within a second, by the socket
        pass
    assert stat.S_IMODE((data / "broker.sock").stat().st_mode) == 0o600
    assert ended(process, signal.SIGTERM)[0] == 0
    assert not (data / "broker.sock").exists()


def test_it_says_which_certificate_it_shows(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "postdate-data"
    add_certificate(data, "server")
    process = start(*FREE_PORTS, *SMALL_FILES, "--tls", "permissive")
    assert process.stdout is not None
    assert f"  tls       permissive, {data / CERTIFICATE_FILE}\n" in [process.stdout.readline() for _ in range(11)]
    assert ended(process, signal.SIGTERM)[0] == 0


def test_a_path_that_is_too_long_for_a_socket_is_refused(start: Start, tmp_path: Path) -> None:
    data = tmp_path / ("x" * 100)
    add_certificate(data, "server")
    flags = (*FREE_PORTS, *SMALL_FILES, "--tls", "enforcing", "--data", data.name)
    assert_refused(start(*flags), "is too long for a socket, at most 107 bytes")


def test_a_folder_that_others_can_read_is_closed_with_one_line(start: Start, tmp_path: Path) -> None:
    first = start(*FREE_PORTS, *SMALL_FILES, "--json")
    assert cli.main(["send", "orders", "hello", "--delay", "1h", "--addr", ready(first)["route"]]) == 0
    assert ended(first, signal.SIGTERM)[0] == 0
    data = tmp_path / "postdate-data"
    assert open_to_others(data) == []
    data.chmod(0o755)
    (data / "FORMAT").chmod(0o644)
    second = start(*FREE_PORTS, "--json")
    ready(second)
    err = ended(second, signal.SIGTERM)[2]
    assert len(err.splitlines()) == 1
    assert "other users of this machine could read 2 files and folders of postdate-data: closed" in err
    assert open_to_others(data) == []
