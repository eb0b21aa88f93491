"""The fixtures for pytest, as a user's test suite has them: the examples of docs/testing.md, and some of our own."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"

OWN = """
import os, postdate, pytest

seen = set()

@pytest.mark.parametrize("_", range(2))
def test_each_test_has_a_broker_of_its_own_to_which_a_connect_without_address_leads(postdate_broker, _):
    assert postdate_broker.address not in seen
    assert os.environ["POSTDATE_ADDR"] == postdate_broker.address
    seen.add(postdate_broker.address)
    with postdate.connect() as client:
        client.send("topic", "hello")
        assert [message.queue_offset for message in client.consume("topic", "group", idle="100ms")] == [0]

def test_the_variable_is_gone_after_it():
    assert "POSTDATE_ADDR" not in os.environ
"""
UNRELATED = """
import sys

def test_nothing_is_loaded():
    assert not [name for name in sys.modules if "postdate" in name]
"""


def run_suite(folder: Path, conftest: str, *sources: str) -> str:
    """Runs a suite in a process of its own; returns what pytest prints."""
    (folder / "conftest.py").write_text(conftest)
    for number, source in enumerate(sources):
        (folder / f"test_suite_{number}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_suites_with_the_fixtures_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (conftest,) = (text for text in blocks if text.startswith("pytest_plugins"))
    output = run_suite(tmp_path, conftest, "\n\n".join(text for text in blocks if "def test_" in text), OWN)
    assert "7 passed" in output, output


def test_who_does_not_ask_for_the_fixtures_loads_nothing(tmp_path: Path) -> None:
    output = run_suite(tmp_path, "", UNRELATED)
    assert "1 passed" in output, output
