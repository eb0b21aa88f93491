"""Clients we did not write: the programs for the PyPI package `rocketmq`, which bundles RocketMQ's C++ core.

`scripts/interop` runs them and those of other languages, which have to be fetched first. Here are those that need
nothing but our requirements, without the one that has to wait half a minute.
"""

import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent / "run.py"
RUN_S = 180.0


def run(*names: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code, and what was printed."""
    done = subprocess.run(
        [sys.executable, str(RUN), *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


def test_the_python_programs_pass() -> None:
    code, lines = run("python", "Messages", "Delays", "Retries")
    assert code == 0, "\n".join(lines)
    verdicts = [line.split()[-5] for line in lines if " checks " in line]
    assert verdicts == ["ok", "ok", "ok", "ok"], "\n".join(lines)
    assert len([line for line in lines if ", signed " in line and " checks " in line]) == 1  # one of them once more


def test_a_client_without_tls_is_named() -> None:
    code, lines = run("python", "Delays", "tls")
    assert code == 0
    assert "SKIPPED python, tls: its C++ core has no TLS; docs/rocketmq.md has a recipe for a tunnel" in lines


def test_a_name_that_nobody_has_runs_nothing() -> None:
    code, lines = run("python", "Delay")
    assert (code, len(lines)) == (2, 1)
    languages = (
        "go", "grpc-go", "grpc-java", "grpc-node", "grpc-python", "grpc-rust", "h2spec", "java", "mqadmin", "node",
        "python",
    )  # fmt: skip
    assert lines[0].startswith(f"NOT RUN: Delay is no language ({', '.join(languages)})")


def test_a_language_whose_tools_are_missing_is_named(tmp_path: Path) -> None:
    code, lines = run("go", "node", "Delays", PATH=str(tmp_path))
    assert code == 2
    assert "NOT RUN go: go is not on the PATH; Debian has it in golang-go" in lines
    assert "NOT RUN node: node is not on the PATH; Debian has it in nodejs" in lines
