"""The clients of the fault suite: how they end."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from verify.faults import workload
from verify.faults.driver import Hung, Lost
from verify.faults.history import History
from verify.faults.workload import Hand, stop


class Jobs:
    """A driver whose job is over when its progress was looked at for the last time."""

    def __init__(self, *seen: str) -> None:
        self._seen = list(seen)
        self.is_over = threading.Event()

    def progress(self) -> str:
        found = self._seen.pop(0)
        if not self._seen:
            self.is_over.set()
        if not found:
            raise Lost("nobody listens")
        return found


class Waiting(Hand):
    """A client that waits for the job, as one that cancels by predicate does."""

    def visit(self) -> None:
        self.driver.is_over.wait()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look after the other, and nothing may stand still for longer than from one to the next."""
    monkeypatch.setattr(workload, "LOOK_S", 0.001)
    monkeypatch.setattr(workload, "IDLE_S", 0.0)


@pytest.fixture
def started() -> Iterator[Any]:
    jobs: list[Jobs] = []

    def start(driver: Any) -> Hand:
        hand = Waiting("job", 1, driver, History())
        jobs.append(driver)
        hand.start()
        return hand

    yield start
    for each in jobs:
        each.is_over.set()


def test_a_client_is_waited_for_while_its_job_makes_progress(started: Any) -> None:
    jobs: Any = Jobs(*(f"job is waiting, {number} jobs before it" for number in range(20)), "", "job is running", "")
    hand = started(jobs)
    stop([hand], jobs)
    assert not hand.is_alive()


def test_a_client_whose_job_stands_still_is_named_with_what_the_job_does(started: Any) -> None:
    jobs: Any = Jobs("job is waiting", *["cancel a is running, writing 1 of 2"] * 2, "unseen")
    with pytest.raises(Hung, match=r"^job does not end, .*: cancel a is running, writing 1 of 2$"):
        stop([started(jobs)], jobs)


def test_a_client_is_not_waited_for_without_end(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "JOIN_S", 0.0)
    jobs: Any = Jobs(*(f"try {number}" for number in range(5)))
    with pytest.raises(Hung, match=r"^job does not end within 0 s: try \d$"):
        stop([started(jobs)], jobs)


def test_a_mistake_of_a_client_is_raised() -> None:
    class Wrong(Hand):
        def visit(self) -> None:
            raise ValueError("a mistake")

    jobs: Any = Jobs("unseen")
    hand = Wrong("p0", 1, jobs, History())
    hand.start()
    with pytest.raises(ValueError, match="a mistake"):
        stop([hand], jobs)
