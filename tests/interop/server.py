"""A broker process for a program: `postdate up` on a folder and free ports, to be killed and started again."""

import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from program import Access, Failed, finished

from postdate.access.rules import User
from postdate.access.users import Users, with_user

POSTDATE = (sys.executable, "-m", "postdate")
START_S = STOP_S = 20.0
CERTIFICATE, KEY = "tls.crt", "tls.key"
PORTS = range(20_000, 30_000)  # below those of outgoing connections: a broker comes back to its port after a kill
_given: set[int] = set()  # several programs run at once: a port that is free may be another one's in a moment
_giving = threading.Lock()


class Server:
    """A broker process on a folder, always on the same ports."""

    def __init__(self, folder: Path, settings: Mapping[str, str], access: Access) -> None:
        self._access = access
        self._data = folder / "data"
        self._output = folder / "server.log"
        route, broker, grpc = free_ports(3)
        self.route, self.grpc = f"127.0.0.1:{route}", f"127.0.0.1:{grpc}"
        named = {"bulk_port": "-1", **settings}  # no Spark: what a client does is the same with it
        if access.user:
            self._data.mkdir(parents=True)
            Users(self._data).change(with_user(User(access.user, access.secret, is_super=True)))
        if access.ca_file:
            make_certificate(folder)
            named |= {"tls": "enforcing", "tls_cert": access.ca_file, "tls_key": str(folder / KEY)}
        named |= {"route_port": str(route), "broker_port": str(broker), "vip_port": "-1", "grpc_port": str(grpc)}
        flags = itertools.chain(*((f"--{name.replace('_', '-')}", value) for name, value in named.items()))
        self._command = [*POSTDATE, "up", "--json", "--data", str(self._data), *flags]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens. Raises Failed."""
        with self._output.open("a") as output:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True
            )
        self._process = process
        with limited(process, START_S):
            assert process.stdout is not None
            line = process.stdout.readline()
        if not line:
            self._end()
            raise Failed(f"the broker did not start:\n{self.said()}")
        assert json.loads(line)["route"] == self.route

    def create(self, kind: str, name: str, *flags: str) -> None:
        """Makes a topic or a group. Raises Failed."""
        command = [*POSTDATE, kind, "create", name, "--addr", self.route, *flags]
        made = finished(command, START_S, environment=self._access.environment())
        if made.returncode:
            raise Failed(f"{kind} {name} cannot be made:\n{made.stdout}")

    def kill(self) -> None:
        """As a crash would."""
        assert self._process is not None
        self._process.kill()
        self._end()

    def stop(self) -> str:
        """Ends it as an operator would, and says what is wrong with how it ended, with its log or with its folder."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with limited(self._process, STOP_S):
            code = self._end()
        if code:
            return f"the broker ended with exit code {code}:\n{self.said()}"
        if " error " in self.said() or "Traceback" in self.said():
            return f"the broker told of errors:\n{self.said()}"
        checked = finished([*POSTDATE, "check", str(self._data)], START_S)
        return f"postdate check ended with {checked.returncode}:\n{checked.stdout}" if checked.returncode else ""

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        code = process.wait()
        process.stdout.close()
        return code

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def said(self) -> str:
        return self._output.read_text()


def make_certificate(folder: Path) -> None:
    """One that signs itself: who trusts its file trusts it. Raises Failed."""
    made = finished(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=postdate", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", str(folder / KEY), "-out", str(folder / CERTIFICATE)],
        START_S,
    )  # fmt: skip
    if made.returncode:
        raise Failed(f"a certificate cannot be made:\n{made.stdout}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, or will be given."""
    found: list[int] = []
    with _giving:
        while len(found) < count:
            port = random.choice(PORTS)
            if port not in _given and is_free(port):
                _given.add(port)
                found.append(port)
    return found


def is_free(port: int) -> bool:
    """Whether it can be listened on: an outgoing connection may have it, too, where the system lends such ports."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def limited(process: "subprocess.Popen[str]", limit_s: float) -> Iterator[None]:
    """Kills a process that takes longer."""
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
