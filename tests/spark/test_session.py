"""A session of Spark on one machine: who can reach it, and what it says to whom."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from postdate.spark.session.session import _protection, _write_secret, silence_py4j
from verify.faults.process import ROOT

LOOPBACK = ("127.", "::1", "::ffff:127.")


def listening(pids: set[int]) -> set[str]:
    """The addresses on which some processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:  # it is closed meanwhile
                continue
            sockets.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                packed = bytes.fromhex(words[1].partition(":")[0])
                words_of_four = (packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
                found.add(socket.inet_ntop(family, b"".join(words_of_four)))
    return found


def family_of(pid: int) -> set[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    found, rest = set[int](), [pid]
    while rest:
        found.add(rest[-1])
        rest += children.get(rest.pop(), [])
    return found


def test_no_port_of_spark_is_open_beyond_this_machine(spark: Any) -> None:
    assert spark.range(10).mapInArrow(lambda batches: batches, "id bigint").count() == 10  # Python workers run, too
    java = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    addresses = listening(family_of(java))
    assert addresses, "the driver listens for its workers"
    assert all(address.startswith(LOOPBACK) for address in addresses), addresses
    assert spark.sparkContext.uiWebUrl is None


def test_the_ports_of_this_machine_ask_for_a_secret(spark: Any) -> None:
    """Other users of the machine reach them, and who speaks to them without proof runs code here."""
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.authenticate") == "true"
    assert conf.get("spark.network.crypto.enabled") == "true"
    host, port = conf.get("spark.driver.host"), int(conf.get("spark.driver.port"))
    assert host == "127.0.0.1"
    # A request of Spark's transport: its length, a type, a number, the length of what Java would make objects of.
    body = b"\xac\xed\x00\x05sr\x00\x04evil"
    frame = b"\x03" + (7).to_bytes(8, "big") + len(body).to_bytes(4, "big") + body
    with socket.create_connection((host, port), 10) as stranger:
        stranger.settimeout(60)
        stranger.sendall((len(frame) + 8).to_bytes(8, "big") + frame)
        answer = b"".join(iter(lambda: stranger.recv(4_096), b""))  # until it is closed
    assert b"java.io." not in answer, "it was read"


def test_processes_of_a_cluster_prove_who_they_are_and_encrypt() -> None:
    for master, secret in (("spark://h:7077", "s"), ("yarn", ""), ("k8s://https://h:443", "")):
        found = _protection(master, secret)
        for name in ("authenticate", "network.crypto.enabled", "io.encryption.enabled"):
            assert found[f"spark.{name}"] == "true"
        assert found["spark.network.crypto.saslFallback"] == "false"
        assert not [name for name, value in found.items() if value == secret]
    assert "spark.authenticate" not in _protection("spark://127.0.0.1:7077", "")


def test_a_secret_is_in_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = _write_secret(tmp_path, "0123456789abcdef")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "spark.authenticate.secret 0123456789abcdef\n"


def test_what_spark_shows_of_its_settings_hides_secrets(spark: Any) -> None:
    pattern = spark.sparkContext._jvm.java.util.regex.Pattern.compile(spark.conf.get("spark.redaction.regex"))
    for name in ("spark.authenticate.secret", "POSTDATE_TOKEN", "fs.s3a.access.key", "db.password", "aws_credentials"):
        assert pattern.matcher(name).find(), name


JAVA_HAS_GONE = """
import logging, threading
from py4j.java_gateway import GatewayClient, GatewayConnection, GatewayParameters
from py4j.protocol import Py4JNetworkError
{silence}
class Gone:
    def send_command(self, command):
        raise Py4JNetworkError("Java has gone")
    def close(self, reset=False):
        pass
client = GatewayClient(gateway_parameters=GatewayParameters())
client.deque.append(Gone())
client.send_command("c")
logging.error("and this is ours")
"""


def test_nothing_is_printed_where_java_goes_during_a_call() -> None:
    """A command that has waited long enough for Spark to stop ends Java, and its user saw a traceback of py4j."""

    def printed(silence: str) -> list[str]:
        script = JAVA_HAS_GONE.format(silence=silence)
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    silence = f"from {silence_py4j.__module__} import silence_py4j; silence_py4j()"
    assert printed(silence) == ["ERROR:root:and this is ours"]
    assert "ERROR:root:Exception while sending command." in printed(""), "py4j still does so"
