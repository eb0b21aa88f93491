"""How many messages wait for each second."""

from postdate.state.quotas import Quotas


def test_a_second_counts_until_it_has_passed() -> None:
    quotas = Quotas()
    for due, topic in ((2_999, "a"), (1_000, "a"), (1_999, "a"), (1_500, "b")):
        quotas.add(due, topic)
    assert [quotas.count(second, "a") for second in (0, 1, 2)] == [0, 2, 1]
    quotas.forget_passed(1_999)
    assert quotas.count(1, "b") == 1
    quotas.forget_passed(2_000)
    assert (quotas.count(1, "a"), quotas.count(2, "a")) == (0, 1)


def test_the_state_comes_back() -> None:
    quotas, again = Quotas(), Quotas()
    for due in (9_000, 1_000, 5_000):
        quotas.add(due, "a")
    again.load(quotas.state())
    assert again.state() == quotas.state()
    again.forget_passed(6_000)
    assert [again.count(second, "a") for second in (1, 5, 9)] == [0, 0, 1]
    assert quotas.count(1, "a") == 1
