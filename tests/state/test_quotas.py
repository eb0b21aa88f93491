"""How many messages wait for each second."""

from postdate.state.quotas import Bursts


def test_a_second_counts_until_it_has_passed() -> None:
    bursts = Bursts()
    for due, topic in ((2_999, "a"), (1_000, "a"), (1_999, "a"), (1_500, "b")):
        bursts.add(due, topic)
    assert [bursts.count(second, "a") for second in (0, 1, 2)] == [0, 2, 1]
    bursts.forget_passed(1_999)
    assert bursts.count(1, "b") == 1
    bursts.forget_passed(2_000)
    assert (bursts.count(1, "a"), bursts.count(2, "a")) == (0, 1)


def test_the_state_comes_back() -> None:
    bursts, again = Bursts(), Bursts()
    for due in (9_000, 1_000, 5_000):
        bursts.add(due, "a")
    again.load(bursts.state())
    assert again.state() == bursts.state()
    again.forget_passed(6_000)
    assert [again.count(second, "a") for second in (1, 5, 9)] == [0, 0, 1]
    assert bursts.count(1, "a") == 1
