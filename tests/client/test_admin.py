"""What the client's admin functions and addresses promise, without a broker."""

import asyncio
from typing import Any

import pytest

from postdate.client import admin
from postdate.client.address import Address, attempts, route_addresses
from postdate.client.errors import TimedOut, Unreachable
from postdate.contract import JobStatus
from postdate.errors import Refused

WAITING = JobStatus("a", 1, "cancel", "waiting", "", "true", 0, 0, 0, 0, 0, 0, 0, "")
DONE = WAITING._replace(state="done", changed=3)
A, B, C = (Address(name, 1) for name in "abc")


def waited(*answers: JobStatus | Exception, away_seconds: float | None = None) -> tuple[JobStatus, list[JobStatus]]:
    """Waits for a job by these answers, one after the other; returns it and what was shown."""
    left, shown = list(answers), list[JobStatus]()

    async def find() -> JobStatus:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asyncio.run(admin.wait_for_job(find, shown.append, away_seconds)), shown


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_POLL_SECONDS", 0.0)


def test_a_job_is_shown_until_it_is_over() -> None:
    assert waited(WAITING, WAITING, DONE) == (DONE, [WAITING, WAITING])
    assert waited(DONE) == (DONE, [])


def test_a_broker_may_be_away_while_a_job_is_waited_for() -> None:
    away = [Unreachable("away"), TimedOut("away")]
    assert waited(WAITING, *away, WAITING, DONE) == (DONE, [WAITING, WAITING])
    with pytest.raises(TimedOut):
        waited(TimedOut("away"), away_seconds=-1.0)
    with pytest.raises(Refused):
        waited(Refused("no"))


def tried(addresses: tuple[Address, ...], failures: dict[Address, Exception]) -> Address:
    for attempt in attempts(addresses):
        with attempt as address:
            if address in failures:
                raise failures[address]
            return address
    raise AssertionError("an attempt has succeeded, or the last one has raised")


def test_the_first_address_that_answers_is_taken() -> None:
    away: dict[Address, Any] = {A: Unreachable("no broker at a"), B: TimedOut("no answer from b")}
    assert tried((A, B, C), {}) == A
    assert tried((A, B, C), away) == C
    with pytest.raises(Unreachable, match="none of a:1, b:1 answers; the last one: no answer from b"):
        tried((A, B), away)
    with pytest.raises(TimedOut, match=r"^no answer from b$"):
        tried((B,), away)
    with pytest.raises(Refused):
        tried((A, B), {A: Refused("no")})


def test_addresses_are_those_of_the_user_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTDATE_ADDR", raising=False)
    assert route_addresses(None) == (Address("127.0.0.1", 9876),)
    monkeypatch.setenv("POSTDATE_ADDR", "a:1;b:1")
    assert route_addresses(None) == (A, B)
    assert route_addresses("c:1") == (C,)
