"""The package as users install it: the base without its extras, the client where there is no Linux, and the wheel.

A program here runs in a process of its own, whose `sitecustomize` makes modules and names missing before it begins.
"""

import os
import subprocess
import sys
import textwrap
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import postdate
from postdate.contract import Stage
from postdate.testing import InProcessBroker
from tests.support.core import FAR_MS, T0, Data, message, registered, send
from verify.faults.process import Broker, free_port

ROOT = Path(__file__).parents[1]
EXTRAS = ("pyspark", "pandas", "pyarrow", "deltalake")
BASE_MB_MAX = 120

# What Windows lacks of what Linux has, as far as anything of ours could use it. macOS lacks less.
NO_LINUX = """
import asyncio, ctypes, os, signal, sys
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop"):
    sys.modules[name] = None
for module, names in {
    os: (
        "O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "fdatasync", "fork", "getuid", "killpg", "nice", "posix_fadvise",
        "posix_fallocate", "pread", "pwrite", "sched_getaffinity", "statvfs", "uname", "waitid",
    ),
    signal: ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "pthread_sigmask", "setitimer"),
}.items():
    for name in names:
        delattr(module, name)
sys.platform = "win32"

def refuse(*_):
    raise NotImplementedError
asyncio.SelectorEventLoop.add_signal_handler = refuse

load = ctypes.CDLL.__init__
def load_by_name(self, name, *rest, **options):
    if name is None:
        raise TypeError("Windows has no library without a name")
    load(self, name, *rest, **options)
ctypes.CDLL.__init__ = load_by_name
"""


class Place:
    """Runs programs in a folder of its own, with what `sitecustomize` leaves them."""

    def __init__(self, folder: Path, sitecustomize: str) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(sitecustomize)
        self.folder = folder
        self.environ = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NO_COLOR": "1"}

    def run(self, *arguments: str, address: str = "") -> "subprocess.CompletedProcess[str]":
        environ = {**os.environ, **self.environ, "POSTDATE_ADDR": address}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    def python(self, source: str, *arguments: str) -> list[str]:
        """Runs a program; returns the lines that it prints."""
        return succeed(self.run("-c", textwrap.dedent(source), *arguments))

    def postdate(self, *words: str, address: str = "") -> list[str]:
        return succeed(self.run("-m", "postdate", *words, address=address))

    def refusal(self, *words: str, address: str = "") -> str:
        """Runs a command that is refused as wrong usage; returns its sentence."""
        done = self.run("-m", "postdate", *words, address=address)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        return line


def succeed(done: "subprocess.CompletedProcess[str]") -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def without(modules: Sequence[str]) -> str:
    return f"import sys\nfor name in {tuple(modules)!r}:\n    sys.modules[name] = None\n"


@pytest.fixture
def base(tmp_path: Path) -> Place:
    """The base package: none of the libraries of an extra can be imported."""
    return Place(tmp_path / "base", without(EXTRAS))


# -- what the package says of itself -----------------------------------------------------------------------------


def test_the_metadata_describe_the_package_and_agree_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == postdate.__version__
    assert project["description"].lower() in (postdate.__doc__ or "")
    assert project["keywords"]
    assert "Typing :: Typed" in project["classifiers"]
    assert (ROOT / "postdate" / "py.typed").exists()
    assert (ROOT / project["readme"]).exists()


# -- without the extras ------------------------------------------------------------------------------------------


def test_a_broker_the_client_and_the_commands_work_without_the_extras(tmp_path: Path, base: Place) -> None:
    broker = Broker(tmp_path, base.environ, bulk_port=free_port())
    broker.start()
    try:
        address = broker.route_address
        assert broker.ready["parts"] == {
            "bulk": "off: it needs postdate[table], run pip install '.[table]' in a clone of Postdate",
            "pipeline": "off, as bulk is: far messages stay in the log and are still on time",
        }
        assert base.python(
            """
            import sys, postdate
            with postdate.connect(sys.argv[1]) as client:
                client.send("orders", "near", delay="300ms", key="k1")
                print(client.cancel(client.send("orders", "far", delay="1d")).value)
                for message in client.consume("orders", group="billing"):
                    print(message.key, message.body.decode())
                    break
            print(sorted({"pyspark", "pandas", "pyarrow", "deltalake"} & {n for n, m in sys.modules.items() if m}))
            """,
            address,
        ) == ["cancelled", "k1 near", "[]"]
        base.postdate("send", "orders", "hello", "--delay", "1h", address=address)
        base.postdate("send", "mails", "now", "--key", "k2", address=address)
        (line,) = base.postdate("consume", "mails", "--group", "billing", "--count", "1", address=address)
        assert "now" in line
        for command in ("status", "pending", "forecast", "find mails k2", "topic list", "group list", "jobs"):
            assert base.postdate(*command.split(), address=address)
    finally:
        broker.stop()
    assert base.postdate("check", str(broker.data))[-1] == "ok"
    assert base.postdate("log", str(broker.data))


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("bulk", "table"),
        ("pipeline", "spark"),
        ("sql select*from_pending", "spark"),
        ("import rows.csv --topic orders --due due --body body", "spark"),
        ("cancel --where true --dry-run", "spark"),
        ("postpone --where true --by 1h --dry-run", "spark"),
    ],
)
def test_a_command_that_needs_an_extra_says_so(base: Place, command: str, extra: str) -> None:
    words = [word.replace("*", " * ").replace("_", " ") for word in command.split()]
    assert f"needs postdate[{extra}]" in base.refusal(*words)
    assert base.postdate(words[0], "--help")


def test_python_calls_that_need_spark_say_so(base: Place) -> None:
    for call in ("postdate.pending", "postdate.spark.register(None)"):
        lines = base.python(
            f"""
            import postdate, postdate.spark
            try:
                {call}
            except postdate.UsageError as error:
                print(error)
            """
        )
        assert "needs postdate[spark]" in lines[0]


def test_a_broker_with_the_table_and_without_spark_starts_bulk_alone(tmp_path: Path) -> None:
    place = Place(tmp_path / "table", without(["pyspark", "pandas"]))
    broker = Broker(tmp_path, place.environ, bulk_port=free_port())
    broker.start()
    try:
        assert broker.ready["parts"]["pipeline"].startswith("off: it needs postdate[spark], run pip install")
        assert not broker.ready["parts"]["bulk"].startswith("off")
    finally:
        broker.stop()


# -- a folder whose table holds messages -------------------------------------------------------------------------


@pytest.fixture
def folder_with_table(data: Data) -> Path:
    """A data folder of which a pipeline has taken one far message into its table."""
    broker = data.open()
    send(broker, T0, message("far", due=T0 + FAR_MS))
    epoch = registered(broker)
    broker.stage(Stage(epoch, (0, 1), (0, T0), (), 1, 0), T0)
    broker.flush()
    data.close_all()
    return data.folder


@pytest.mark.parametrize(
    ("missing", "extra", "otherwise"),
    [(EXTRAS, "table", ("--bulk-port", "-1")), (["pyspark"], "spark", ("--pipeline", "none"))],
)
def test_a_folder_whose_table_holds_messages_is_refused_unless_that_is_meant(
    tmp_path: Path, folder_with_table: Path, missing: Sequence[str], extra: str, otherwise: tuple[str, str]
) -> None:
    place = Place(tmp_path / "place", without(missing))
    up = ("up", "--data", str(folder_with_table), "--route-port", "0", "--broker-port", "0", "--vip-port", "-1")
    assert place.refusal(*up, "--grpc-port", "-1") == (
        f"postdate: 1 messages wait in the table of {folder_with_table}: to deliver them, a broker needs"
        f" postdate[{extra}] (run pip install '.[{extra}]' in a clone of Postdate), or give {' '.join(otherwise)} "
        + {"table": "to leave them there", "spark": "and run postdate pipeline elsewhere"}[extra]
    )
    flag = {otherwise[0].removeprefix("--").replace("-", "_"): otherwise[1]}
    broker = Broker(tmp_path, place.environ, data=folder_with_table, **({"bulk_port": free_port()} | flag))
    broker.start()
    broker.stop()


def test_a_table_is_not_called_checked_where_nothing_can_read_it(base: Place, data: Data) -> None:
    broker = data.open()
    broker.register_pipeline(T0, table=str(data.folder / "table"))
    data.close_all()
    assert f"the check of the table {data.folder}/table needs postdate[table]" in base.refusal(
        "check", str(data.folder)
    )


# -- without Linux -----------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Place:
    return Place(tmp_path / "elsewhere", NO_LINUX + without(EXTRAS))


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        yield broker


def test_the_client_works_where_there_is_no_linux(elsewhere: Place, broker: InProcessBroker) -> None:
    assert elsewhere.python(
        """
        import asyncio, sys, postdate
        address = sys.argv[1]
        with postdate.connect(address) as client:
            client.send("orders", "hello", key="k")
            print(client.cancel(client.send("orders", "never", delay="1d")).value)
            print(next(client.consume("orders", "billing")).body.decode())

        async def main():
            async with postdate.connect_async(address) as client:
                async for message in client.consume("orders", "other"):
                    return message.body.decode()
        print(asyncio.run(main()))
        """,
        broker.address,
    ) == ["cancelled", "hello", "hello"]


def test_the_commands_work_where_there_is_no_linux(elsewhere: Place, broker: InProcessBroker) -> None:
    address = broker.address
    elsewhere.postdate("send", "orders", "hello", "--key", "k", address=address)
    (line,) = elsewhere.postdate("consume", "orders", "--group", "billing", "--count", "1", address=address)
    assert "hello" in line
    for command in ("status", "pending", "find orders k", "topic list", "group list", "jobs", "--version"):
        assert elsewhere.postdate(*command.split(), address=address)
    for command in ("up", "check", "log"):
        assert elsewhere.postdate(command, "--help")
    assert elsewhere.refusal("up").startswith("postdate: a broker needs Linux, and this is win32")


def test_the_in_process_broker_works_where_there_is_no_linux(elsewhere: Place) -> None:
    assert elsewhere.python(
        """
        import postdate, postdate.testing
        with postdate.testing.InProcessBroker() as broker, postdate.connect(broker.address) as client:
            client.send("reminders", "hello", delay="1d")
            broker.advance("1d")
            print(next(client.consume("reminders", "mail")).body.decode())
        """
    ) == ["hello"]


# -- the wheel ---------------------------------------------------------------------------------------------------


@pytest.mark.full  # asks the package index for what the base package needs
def test_the_wheel_of_a_clone_is_small_and_sends_and_receives(tmp_path: Path) -> None:
    clone, wheels = tmp_path / "clone", tmp_path / "wheels"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(tmp_path / "venv")  # without pip, which would count
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(clone)], check=True)
    (wheel,) = wheels.glob("postdate-*.whl")
    names = subprocess.run([python, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True).stdout
    assert "postdate/testing/broker.py" in names
    assert "verify/" not in names
    assert "tests/" not in names
    subprocess.run([*pip, "install", str(wheel)], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    installed = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    assert not installed & set(EXTRAS)
    size_mb = sum(path.stat().st_blocks * 512 for path in packages.rglob("*")) >> 20  # on disk, as du counts it
    print(f"the base package takes {size_mb} MB")
    assert size_mb <= BASE_MB_MAX, f"{size_mb} MB"
    send_and_receive(tmp_path, [str(python.with_name("postdate"))])


def send_and_receive(folder: Path, command: list[str]) -> None:
    """Starts a broker, sends a message that is due in a second, and receives it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    port = free_port()
    up = [*command, "up", "--json", "--route-port", str(port), "--broker-port", "0", "--vip-port", "-1"]
    up += ["--grpc-port", "0"]
    broker = subprocess.Popen(up, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None
        assert postdate.__version__ in broker.stdout.readline()
        address = ["--addr", f"127.0.0.1:{port}"]
        subprocess.run([*command, "send", "orders", "hello", "--delay", "1s", *address], env=environ, check=True)
        received = subprocess.run(
            [*command, "consume", "orders", "--group", "billing", "--count", "1", *address],
            env=environ, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        assert "hello" in received.stdout
    finally:
        broker.terminate()
        broker.wait()
        assert broker.stdout is not None
        broker.stdout.close()
