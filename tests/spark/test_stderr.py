"""What Spark writes to stderr is kept apart from what we tell there. In a process of its own, whose stderr is one."""

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import logging, subprocess, sys
from postdate.cli.logs import start_logging
from postdate.spark.session.stderr import divert_stderr

start_logging(sys.argv[1], only="postdate")
logger = logging.getLogger("postdate.pipeline")
with divert_stderr() as last:
    print("a thread of Spark's", file=sys.stderr)
    print("Traceback (most recent call last):\\n  File x\\n", file=sys.stderr, flush=True)
    subprocess.run(["sh", "-c", "echo a JVM >&2"])
    logger.warning("ours")
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)  # nobody waits for it
child.kill()
child.wait()
print(list(last))
print("behind it", file=sys.stderr)
logger.warning("ours again")
"""


def told(level: str) -> tuple[str, list[str]]:
    """What is printed; and the lines on stderr, without their instants."""
    words = [sys.executable, "-c", PROGRAM, level]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=True, cwd=Path(__file__).parent)
    return done.stdout, [re.sub(r"^\S+Z ", "", line) for line in done.stderr.splitlines()]


def test_only_the_log_is_told_and_the_rest_is_at_hand() -> None:
    output, lines = told("info")
    assert output == "[\"a thread of Spark's\", 'a JVM']\n"
    assert lines == ["warning  ours", "behind it", "warning  ours again"]


def test_the_level_debug_shows_everything() -> None:
    _, lines = told("debug")
    assert "debug    spark: a thread of Spark's" in lines
    assert "debug    spark: Traceback (most recent call last):" in lines
    assert "debug    spark: a JVM" in lines
    assert lines[-2:] == ["behind it", "warning  ours again"]
