"""The hash of a key."""

import pytest
from xxhash import xxh3_64_intdigest

from postdate.keys import key_hash


def test_no_key_has_the_hash_zero() -> None:
    assert key_hash("") == 0


@pytest.mark.parametrize("key", ["order-1", "Bestellung-ä", "订单"])
def test_a_key_has_the_hash_of_its_utf_8(key: str) -> None:
    assert key_hash(key) == xxh3_64_intdigest(key.encode()) != 0


def test_a_key_that_utf_8_cannot_carry_has_a_hash_too() -> None:
    assert key_hash("a\ud800") == xxh3_64_intdigest("a\ud800".encode("utf-8", "surrogatepass"))
