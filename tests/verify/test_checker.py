"""The checker of the fault suite: it accepts a history that keeps all promises, and names each broken invariant."""

from typing import Any

import pytest

from verify.faults import checker
from verify.faults.checker import INVARIANTS, Bounds, Violation, judge
from verify.faults.history import Event
from verify.faults.layer import fault_points
from verify.faults.process import ROOT
from verify.faults.troubles import AWAY, TROUBLES

NOW = 1_800_000_000_000
PLACE = "faults/0"


class Story:
    """Builds a history: events at given instants."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, at: float, kind: str, **fields: Any) -> "Story":
        self.events.append({"at": NOW + at, "kind": kind, **fields})
        return self

    def sent(
        self, key: str, at: float, due: int = 0, outcome: str = "acknowledged", form: str = "", group: str = ""
    ) -> "Story":
        """A send at an instant, answered 10 ms later."""
        form, value = form or ("instant" if due else "none"), NOW + due if due else 0
        self.note(at, "send", key=key, client="p", form=form, value=value, span=due, group=group)
        told = NOW + due if due and outcome == "acknowledged" else 0
        return self.note(at + 10, "sent", key=key, outcome=outcome, due=told)

    def cancelled(self, key: str, at: float, outcome: str = "cancelled") -> "Story":
        return self.note(at + 5, "cancelled", key=key, began=NOW + at, outcome=outcome)

    def moved(self, key: str, at: float, to: int, outcome: str = "moved", took: float = 5) -> "Story":
        """A move that was asked for at an instant, and answered a little later."""
        due = NOW + to if outcome == "moved" else 0
        return self.note(at + took, "moved", key=key, began=NOW + at, to=NOW + to, outcome=outcome, due=due, was=0)

    def entry(self, key: str, offset: int, visible: float, whole: bool = True, place: str = PLACE) -> "Story":
        return self.note(90_000, "entry", key=key, place=place, offset=offset, visible=NOW + visible, whole=whole)

    def saw(
        self, key: str, offset: int, at: float, group: str = "g", visible: float | None = None, place: str = PLACE
    ) -> "Story":
        shown = NOW + (at if visible is None else visible)
        return self.note(
            at, "saw", key=key, group=group, place=place, offset=offset, visible=shown, attempt=0, whole=True,
            asked=NOW + at - 1,
        )  # fmt: skip

    def without(self, kind: str, key: str) -> "Story":
        self.events = [each for each in self.events if (each["kind"], each.get("key")) != (kind, key)]
        return self

    def broken(self, bounds: Bounds | None = None) -> list[str]:
        return [violation.invariant for violation in judge(self.events, bounds)]


def honest_story() -> Story:
    """A history with every kind of message that keeps all promises."""
    story = Story()
    story.sent("plain", 0).sent("timed", 100, due=1_000).sent("stopped", 200, due=2_000)
    story.sent("refused", 300, outcome="refused").sent("doubtful", 400, due=3_000, outcome="in doubt")
    story.cancelled("stopped", 1_500)
    story.sent("later", 0, due=2_000).moved("later", 500, to=30_000).moved("later", 1_000, to=20_000)
    story.sent("taken", 0, due=2_000).moved("taken", 500, to=30_000).cancelled("taken", 3_000)
    story.entry("plain", 0, 5).entry("timed", 1, 1_001).entry("later", 0, 20_001, place="faults/1")
    story.saw("plain", 0, 20, visible=5).saw("timed", 1, 1_002, visible=1_001)
    story.saw("later", 0, 20_002, visible=20_001, place="faults/1")
    story.note(95_000, "read", group="g")
    story.note(50, "sample", resident=100 << 20, files=20)
    story.note(0, "start", cpu_s=1.0, waiting=10_000_000, resident=50 << 20)
    return story.note(96_000, "written", rows=100, writes=250)


def test_a_history_that_keeps_all_promises_passes() -> None:
    assert judge(honest_story().events) == []


def test_both_outcomes_of_a_doubt_are_right() -> None:
    assert honest_story().entry("doubtful", 2, 3_000).broken() == []
    story = honest_story().sent("maybe", 500, due=5_000).cancelled("maybe", 600, "in doubt")
    assert story.broken() == []
    assert story.entry("maybe", 2, 5_000).broken() == []


def test_a_message_sent_back_without_an_answer_may_come_again_or_not() -> None:
    assert returned("back").broken() == returned("back", "returned").broken() == []


# -- a planted violation of each ---------------------------------------------------------------------------------


def lost() -> Story:
    return honest_story().without("entry", "timed")


def never_seen() -> Story:
    return honest_story().without("saw", "timed")


def altered() -> Story:
    return honest_story().without("entry", "timed").entry("timed", 1, 1_001, whole=False)


def foreign() -> Story:
    return honest_story().entry("stray", 2, 1_001)


def refused_and_there() -> Story:
    return honest_story().entry("refused", 2, 1_001)


def job_took_too_many() -> Story:
    story = honest_story().sent("j1", 0, due=5_000, group="j").sent("j2", 0, due=5_000, group="j")
    return story.note(500, "job", group="j", changed=1)


def early_in_the_queue() -> Story:
    return honest_story().without("entry", "timed").entry("timed", 1, 999)


def early_in_hand() -> Story:
    return honest_story().saw("timed", 1, 999, visible=1_001)


def due_before_it_was_wanted() -> Story:
    story = honest_story().note(100, "send", key="soon", client="p", form="span", value=1_000, span=1_000, group="")
    story.note(110, "sent", key="soon", outcome="acknowledged", due=NOW + 99 + 1_000 - checker.SLACK_MS)
    return story.entry("soon", 2, 1_100).saw("soon", 2, 1_101)


def cancelled_and_there() -> Story:
    return honest_story().entry("stopped", 2, 2_000)


def cancelled_and_seen() -> Story:
    return honest_story().saw("stopped", 9, 2_000)


def job_took_too_few() -> Story:
    return job_took_too_many().entry("j1", 2, 5_000).entry("j2", 3, 5_000)


def two_answers() -> Story:
    return honest_story().cancelled("stopped", 2_100, "delivered")


def delivered_and_nowhere() -> Story:
    return (
        honest_story()
        .sent("gone", 0, due=1_000)
        .cancelled("gone", 1_100, "delivered")
        .cancelled("gone", 1_200, "unknown")
    )


def waits_and_is_not_found() -> Story:
    return honest_story().sent("here", 0, due=9_000).cancelled("here", 100, "unknown")


def late() -> Story:
    return honest_story().without("entry", "timed").entry("timed", 1, 1_000 + Bounds().lateness_ms_p99 + 1)


def imported(visible: int, *moves: tuple[str, int], due: int = 40_000) -> Story:
    """A message was imported, postponed by 20 s (`moves`: the event, how many), and visible at an instant."""
    story = honest_story()
    story.note(100, "send", key="import1x0", client="import", form="instant", value=NOW + due, span=0, group="")
    story.note(200, "sent", key="import1x0", outcome="acknowledged", due=0)
    for kind, changed in moves:
        story.note(300, kind, prefix="import1x", by=20_000, changed=changed)
    return story.entry("import1x0", 2, visible).saw("import1x0", 2, visible + 1, visible=visible)


def imported_and_late() -> Story:
    """The pipeline was away all the time; that is no excuse."""
    story = imported(42_000).note(1_000, "trouble", name="away", is_excuse=False)
    return story.note(80_000, "over", name="away", began=NOW + 1_000)


def postponed_and_late() -> Story:
    return imported(62_000, ("postpone", 0), ("postponed", 1))


def postponed_and_early() -> Story:
    return imported(40_000, ("postpone", 0), ("postponed", 1))


def moved(visible: int, *moves: tuple[float, int, str], took: float = 5) -> Story:
    """A message is due at 10 s, was moved (at, to, outcome), and is visible at an instant."""
    story = honest_story().sent("m", 0, due=10_000)
    for at, to, outcome in moves:
        story.moved("m", at, to, outcome, took)
    return story.entry("m", 2, visible).saw("m", 2, visible + 1, visible=visible)


def moved_and_at_its_earlier_due() -> Story:
    return moved(10_001, (1_000, 30_000, "moved"))


def moved_twice_and_at_the_first_of_them() -> Story:
    return moved(20_001, (1_000, 20_000, "moved"), (2_000, 30_000, "moved"))


def moved_earlier_and_at_its_first_due() -> Story:
    return moved(10_001, (1_000, 5_000, "moved"))


def moved_back_and_late() -> Story:
    return moved(30_001, (1_000, 30_000, "moved"), (2_000, 10_000, "moved"))


def moved_to_before_it_was_asked_for() -> Story:
    story = honest_story().sent("m", 0, due=10_000)
    story.note(105, "moved", key="m", began=NOW + 100, to=NOW + 20_000, outcome="moved", due=NOW + 19_999, was=0)
    return story.entry("m", 2, 20_001).saw("m", 2, 20_002, visible=20_001)


def moved_and_lost() -> Story:
    return moved(20_001, (1_000, 20_000, "moved")).without("entry", "m")


def moved_while_its_import_was_in_doubt_and_lost() -> Story:
    story = honest_story().sent("m", 0, due=10_000, outcome="in doubt").moved("m", 1_000, to=20_000)
    return story.saw("m", 9, 20_001)


def both_copies_live() -> Story:
    return moved(20_001, (1_000, 20_000, "moved")).entry("m", 3, 20_002)


def cancelled_where_it_was_and_there() -> Story:
    """The cancel took the old copy only."""
    return moved(20_001, (1_000, 20_000, "moved")).cancelled("m", 3_000)


def old_handle_cancels_no_more() -> Story:
    return moved(20_001, (1_000, 20_000, "moved")).cancelled("m", 12_000, "unknown")


def old_handle_says_delivered() -> Story:
    return moved(20_001, (1_000, 20_000, "moved")).cancelled("m", 12_000, "delivered")


def moved_though_cancelled() -> Story:
    story = honest_story().sent("m", 0, due=10_000).cancelled("m", 1_000)
    return story.moved("m", 2_000, to=20_000)


def moved_though_seen() -> Story:
    return moved(10_001, (10_500, 10_001, "moved"))


def moved_though_delivered() -> Story:
    return moved(20_001, (10_100, 20_000, "delivered"), (10_200, 20_000, "moved"))


def delivered_by_a_move_and_nowhere() -> Story:
    story = honest_story().sent("m", 0, due=10_000).moved("m", 10_100, 20_000, "delivered")
    return story.cancelled("m", 10_200, "unknown")


def cancelled_and_delivered_by_a_move() -> Story:
    story = honest_story().sent("m", 0, due=10_000).moved("m", 10_100, 20_000, "delivered")
    return story.cancelled("m", 10_090)


def waits_and_a_move_says_delivered() -> Story:
    return moved(10_001, (1_000, 20_000, "delivered"))


def waits_and_a_move_says_unknown() -> Story:
    return moved(20_001, (1_000, 20_000, "moved"), (12_000, 30_000, "unknown"))


def rewritten() -> Story:
    return honest_story().note(97_000, "written", rows=100, writes=301)


def slow_start() -> Story:
    return honest_story().note(0, "start", cpu_s=Bounds().restart_cpu_s_max + 1, waiting=10, resident=0)


def doubled() -> Story:
    return honest_story().entry("timed", 2, 1_002)


def two_receipts_of_one_id() -> Story:
    story = honest_story().note(110, "receipt", key="timed", handle="a handle", due=NOW + 1_000)
    return story.note(500, "receipt", key="timed", handle="another one", due=NOW + 1_000)


def gap() -> Story:
    return honest_story().without("entry", "timed").entry("timed", 2, 1_001)


def changed_at_its_offset() -> Story:
    story = honest_story().sent("other", 0).saw("other", 2, 30).entry("other", 3, 30)
    return story.sent("third", 0).entry("third", 2, 40).saw("third", 2, 41)


def came_again() -> Story:
    return honest_story().note(1_100, "done", group="g", key="timed").saw("timed", 1, 1_200, visible=1_001)


def returned(*kinds: str) -> Story:
    """`plain` was sent back, with these events: `back` asks for it, `backed` is the answer, `returned` is read.
    Another message was sent back and came again.
    """
    story = honest_story()
    for kind in ("back", "backed", "returned"):
        story.note(60, kind, group="g", key="timed")
    for kind in kinds:
        story.note(70, kind, group="g", key="plain")
    return story.note(96_000, "returns were read")


def did_not_come_back() -> Story:
    return returned("back", "backed")


def came_back_twice() -> Story:
    return returned("back", "backed", "returned", "returned")


def came_back_by_itself() -> Story:
    return returned("returned")


def too_much_memory() -> Story:
    return honest_story().note(60, "sample", resident=Bounds().resident_bytes_max + 1, files=1)


PLANTED = {
    "I1": (
        lost,
        never_seen,
        altered,
        foreign,
        refused_and_there,
        job_took_too_many,
        did_not_come_back,
        moved_and_lost,
        moved_while_its_import_was_in_doubt_and_lost,
    ),
    "I2": (
        early_in_the_queue,
        early_in_hand,
        due_before_it_was_wanted,
        postponed_and_early,
        moved_and_at_its_earlier_due,
        moved_twice_and_at_the_first_of_them,
        moved_to_before_it_was_asked_for,
    ),
    "I3": (cancelled_and_there, cancelled_and_seen, job_took_too_few, cancelled_where_it_was_and_there),
    "I4": (
        two_answers,
        delivered_and_nowhere,
        waits_and_is_not_found,
        old_handle_cancels_no_more,
        old_handle_says_delivered,
        moved_though_cancelled,
        moved_though_seen,
        moved_though_delivered,
        delivered_by_a_move_and_nowhere,
        cancelled_and_delivered_by_a_move,
        waits_and_a_move_says_delivered,
        waits_and_a_move_says_unknown,
    ),
    "I5": (late, imported_and_late, postponed_and_late, moved_earlier_and_at_its_first_due, moved_back_and_late),
    "I6": (rewritten,),
    "I7": (slow_start,),
    "I8": (
        doubled,
        both_copies_live,
        two_receipts_of_one_id,
        gap,
        changed_at_its_offset,
        came_again,
        came_back_twice,
        came_back_by_itself,
    ),
    "I9": (too_much_memory,),
}


def test_every_invariant_has_a_planted_violation() -> None:
    assert PLANTED.keys() == INVARIANTS.keys()


@pytest.mark.parametrize(
    ("invariant", "plant"), [(name, plant) for name, plants in PLANTED.items() for plant in plants]
)
def test_a_planted_violation_is_caught(invariant: str, plant: Any) -> None:
    broken = plant().broken()
    assert invariant in broken
    assert set(broken) == {invariant}, "it is blamed on nothing else"


def test_a_finding_of_the_run_is_a_violation() -> None:
    found = judge(honest_story().note(5, "finding", invariant="I1", sentence="it does not start").events)
    assert found == [Violation("I1", "it does not start")]
    assert str(found[0]) == "I1: it does not start"


# -- excuses ------------------------------------------------------------------------------------------------------


def test_a_message_that_is_due_during_a_fault_may_be_late() -> None:
    story = late().note(900, "trouble", name="kill", until=None).note(2_000, "over", name="kill", began=NOW + 900)
    assert story.broken() == []
    story = (
        late().note(40_000, "trouble", name="kill", until=None).note(41_000, "over", name="kill", began=NOW + 40_000)
    )
    assert story.broken() == ["I5"], "a fault that came long after it is no excuse"


def test_a_message_that_a_job_may_have_postponed_comes_then_or_later() -> None:
    assert imported(60_000, ("postpone", 0), ("postponed", 1)).broken() == []
    for visible in (40_000, 60_000):
        assert imported(visible, ("postpone", 0)).broken() == [], "the answer of the job was lost"
        assert imported(visible, ("postpone", 0), ("postponed", 0)).broken() == [], (
            "nobody knows which ones came too late"
        )
    assert set(imported(39_000, ("postpone", 0)).broken()) == {"I2"}


def test_a_message_whose_move_is_in_doubt_comes_at_any_of_its_possible_dues() -> None:
    for visible in (10_001, 20_001, 30_001):
        doubt = moved(visible, (1_000, 20_000, "in doubt"), (2_000, 30_000, "refused"))
        assert doubt.broken() == [], "nobody knows whether it is late"
        doubt = moved(visible, (500, 10_000, "moved"), (1_000, 20_000, "in doubt"))
        assert doubt.broken() == []
    assert set(moved(15_001, (500, 20_000, "in doubt"), (1_000, 30_000, "moved")).broken()) == {"I2"}
    story = moved(20_001, (500, 20_000, "in doubt"), (1_000, 30_000, "moved"))
    assert story.broken() == [], "it may have lain in a socket, and was done after the other one"


def test_of_moves_at_the_same_time_either_may_be_the_last() -> None:
    for visible in (20_001, 30_001):
        assert moved(visible, (1_000, 20_000, "moved"), (1_002, 30_000, "moved")).broken() == []
    assert set(moved(10_001, (1_000, 20_000, "moved"), (1_002, 30_000, "moved")).broken()) == {"I2"}


def test_a_move_finds_nothing_that_may_be_cancelled() -> None:
    for outcome in ("cancelled", "in doubt"):
        story = honest_story().sent("m", 0, due=10_000).cancelled("m", 1_000, outcome)
        assert story.moved("m", 2_000, 20_000, "unknown").broken() == []
    raced = honest_story().sent("m", 0, due=10_000).cancelled("m", 1_000).moved("m", 1_002, to=20_000)
    assert raced.broken() == [], "the cancel came after the move"


def test_during_a_fault_a_move_may_be_unknown_and_never_delivered() -> None:
    for outcome, broken in (("unknown", []), ("delivered", ["I4"])):
        story = (
            moved(10_001, (1_000, 20_000, outcome)).note(990, "trouble", name="kill").note(1_010, "sample", resident=0)
        )
        assert story.note(1_020, "over", name="kill", began=NOW + 990).broken() == broken


def test_a_move_that_was_asked_for_now_comes_at_once() -> None:
    story = honest_story().sent("m", 0, due=10_000)
    story.note(2_010, "moved", key="m", began=NOW + 2_000, to=0, outcome="moved", due=NOW + 2_004, was=NOW + 10_000)
    assert story.entry("m", 2, 2_004).saw("m", 2, 2_008, visible=2_004).broken() == []


def test_a_job_and_a_move_at_the_same_time_leave_both_dues_possible() -> None:
    for visible in (50_001, 70_001):
        story = imported(visible, ("postpone", 0), ("postponed", 1)).moved("import1x0", 250, to=50_000, took=500)
        assert story.broken() == []
    story = imported(55_001, ("postpone", 0), ("postponed", 1)).moved("import1x0", 400, to=55_000)
    assert story.broken() == [], "a move after the job counts alone"
    assert "I2" in imported(50_000, ("postpone", 0), ("postponed", 1)).moved("import1x0", 400, to=55_000).broken()


def test_during_a_fault_a_cancel_may_be_unknown_and_never_delivered() -> None:
    faulty = {"name": "kill", "until": None}
    assert waits_and_is_not_found().note(90, "trouble", **faulty).broken() == []
    story = honest_story().sent("here", 0, due=9_000).cancelled("here", 100, "delivered").entry("here", 2, 9_000)
    assert story.saw("here", 2, 9_001).note(90, "trouble", **faulty).broken() == ["I4"]


def test_the_clock_of_the_broker_counts() -> None:
    story = honest_story().without("entry", "timed").without("saw", "timed").note(300, "clock", offset=700)
    story.entry("timed", 1, 1_000).saw("timed", 1, 310, visible=1_000)
    assert story.broken() == [], "its clock was ahead"
    back = (
        honest_story().without("saw", "later").note(50, "clock", offset=-60_000).saw("timed", 1, 1_500, visible=1_001)
    )
    assert "I2" not in back.broken(), "it may have been due before the clock went back: that is for its queue to say"


def test_a_relative_delay_counts_from_the_lowest_time_that_the_clock_may_have_shown() -> None:
    story = Story().note(0, "send", key="a", client="p", form="span", value=500, span=500, group="")
    story.note(10, "sent", key="a", outcome="acknowledged", due=NOW + 505)
    assert story.entry("a", 0, 505).broken() == []
    assert Story().sent("b", 0, due=500, form="span").entry("b", 0, 499).broken() == ["I2"]


def test_the_page_lists_the_invariants_and_the_faults() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| I")]
    assert {name.strip(): text.strip() for name, text in rows} == INVARIANTS
    named = {
        name.strip() for line in page.splitlines() if line.count("|") == 3 for name in line.split("|")[1].split(",")
    }
    assert {trouble.name for trouble in (*TROUBLES, *AWAY)} <= named
    assert f"have {len(fault_points())};" in page
