"""The driver of Postdate in the fault suite: what it says of moves, and of cancels of what was moved."""

import subprocess
import sys
from pathlib import Path

import pytest

from postdate.clock import ManualClock
from tests.server.requests.test_recall import pass_and_settle
from tests.support.core import T0
from tests.support.server import serving
from verify.faults.driver import Answer, Cancel, Form, Move, Moved, Sent, Wish
from verify.faults.process import ROOT
from verify.faults.remoting import Remoting

WAYS = pytest.mark.parametrize("way", range(3))


@WAYS
def test_a_move_says_what_became_of_the_message(tmp_path: Path, way: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        driver = Remoting(served.port, "", tmp_path)
        driver.prepare()
        producer = driver.producer()
        wish = Wish("a", Form.INSTANT, T0 + 5_000)
        (answer,) = producer.send([wish])
        assert producer.move(wish, answer, T0 + 9_000, way) == Move(Moved.MOVED, T0 + 9_000, T0 + 5_000)
        pass_and_settle(served, 6_000)
        assert list(driver.entries({})) == []
        assert producer.move(wish, answer, 0, way) == Move(Moved.MOVED, T0 + 6_000, T0 + 9_000)
        assert [(entry.key, entry.visible_at_ms) for entry in driver.entries({})] == [("a", T0 + 6_000)]
        assert producer.move(wish, answer, 0, way).outcome is Moved.DELIVERED
        assert producer.cancel_moved(wish, answer, way) is Cancel.DELIVERED
        producer.drop()
        assert producer.move(wish, answer, 0, way) == Move(Moved.IN_DOUBT)
        producer.close()


@WAYS
def test_a_moved_message_is_cancelled_by_its_first_handle_and_by_its_key(tmp_path: Path, way: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        driver = Remoting(served.port, "", tmp_path)
        driver.prepare()
        producer = driver.producer()
        wish = Wish("a", Form.SPAN, 5_000, 5_000)
        (answer,) = producer.send([wish])
        assert producer.move(wish, answer, T0 + 9_000, way).outcome is Moved.MOVED
        assert producer.cancel_moved(wish, answer, way) is Cancel.CANCELLED
        assert producer.move(wish, answer, 0, way) == Move(Moved.UNKNOWN)
        other = Wish("b", Form.INSTANT, T0 + 5_000)
        assert producer.cancel_moved(other, Answer(Sent.ACKNOWLEDGED), way) is Cancel.UNKNOWN, "an import has no handle"
        pass_and_settle(served, 10_000)
        assert list(driver.entries({})) == []
        producer.close()


def test_what_is_sent_once_has_one_receipt_and_one_entry(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        driver = Remoting(served.port, "", tmp_path)
        driver.prepare()
        one, other = driver.producer(), driver.producer()
        for wish in (Wish("now", Form.NONE), Wish("later", Form.SPAN, 5_000, 5_000)):
            first = one.send_once(wish, 0)
            assert first.outcome is Sent.ACKNOWLEDGED
            pass_and_settle(served, 1_000)
            assert [each.send_once(wish, attempt) for attempt, each in enumerate((one, other), 1)] == [first] * 2
        assert one.cancel_moved(wish, first, 1) is Cancel.CANCELLED
        assert other.send_once(wish, 3) == first, "it is not sent again"
        pass_and_settle(served, 10_000)
        assert [(entry.key, entry.body) for entry in driver.entries({})] == [("now", Wish("now", Form.NONE).body)]
        one.drop()
        assert one.send_once(wish, 4) == Answer(Sent.IN_DOUBT)
        one.close()
        other.close()


HANGS = """
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from verify.faults import remoting

def cancel_where(predicate, **named):
    has_asked.set()
    threading.Event().wait()

has_asked = threading.Event()
client = SimpleNamespace(cancel_where=cancel_where)
remoting.postdate = SimpleNamespace(connect=lambda *_, **__: nullcontext(client))
driver = remoting.Remoting(0, "", Path())
threading.Thread(target=driver.run_long_job, args=("long", None), daemon=True).start()
has_asked.wait()
"""


def test_a_long_job_that_never_ends_does_not_keep_the_run_from_ending() -> None:
    """Python ends no process before the threads of its pools."""
    subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, timeout=60, check=True)
