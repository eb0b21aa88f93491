"""Whom the broker asks about a transaction: producers of every protocol, in turn, that take a question."""

from postdate.broker.transactions import OpenHalf
from postdate.server.sessions.checkers import Ask, Checkers
from postdate.state.transactions import Half


def half(number: int = 0, check_count: int = 0) -> OpenHalf:
    return OpenHalf(Half(8, 100, 0, number, 1, 0, 0, check_count), "orders", 0, "billing", "k", "", b"")


class Asked:
    """Producers that note whom the broker has asked."""

    def __init__(self, *busy: str) -> None:
        self.names: list[str] = []
        self._busy = busy

    def producer(self, name: str) -> Ask:
        def ask(_: OpenHalf) -> bool:
            if name in self._busy:
                return False
            self.names.append(name)
            return True

        return ask


def test_nobody_is_there() -> None:
    checkers = Checkers()
    assert not checkers.ask(half())
    checkers.add(lambda _: [])
    assert not checkers.ask(half())


def test_producers_of_all_sources_take_turns() -> None:
    checkers, asked = Checkers(), Asked()
    checkers.add(lambda _: [asked.producer("a"), asked.producer("b")])
    checkers.add(lambda _: [asked.producer("c")])
    assert all(checkers.ask(half(number)) for number in range(4))
    assert asked.names == ["a", "b", "c", "a"]
    assert all(checkers.ask(half(check_count=count)) for count in range(3))
    assert asked.names[4:] == ["a", "b", "c"], "each check of a half goes to the next one"


def test_who_takes_no_question_is_passed_over() -> None:
    checkers, asked = Checkers(), Asked("a")
    checkers.add(lambda _: [asked.producer("a"), asked.producer("b")])
    assert checkers.ask(half())
    assert asked.names == ["b"]
    busy = Checkers()
    busy.add(lambda _: [asked.producer("a")])
    assert not busy.ask(half())


def test_a_source_is_asked_about_the_very_half() -> None:
    checkers, seen = Checkers(), list[tuple[str, str]]()

    def find(asked: OpenHalf) -> list[Ask]:
        seen.append((asked.group, asked.topic))
        return []

    checkers.add(find)
    checkers.ask(half())
    assert seen == [("billing", "orders")]
