"""What callers may pass as keys, properties and receipts, and what is refused with a sentence."""

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import postdate
from postdate.client.outgoing import Outgoing, seal
from postdate.errors import UsageError
from postdate.message import decode_properties


def sealed_properties(**wishes: Any) -> dict[str, str]:
    return decode_properties(seal(Outgoing(b"x", **wishes), "U1").properties)


ORDER_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("order-17", "order-17"),
        (42, "42"),
        (ORDER_ID, "12345678-1234-5678-1234-567812345678"),
        (["order-17", 4, ORDER_ID], "order-17 4 12345678-1234-5678-1234-567812345678"),
        (("a", "b"), "a b"),
    ],
)
def test_a_key_becomes_text(key: Any, text: str) -> None:
    assert sealed_properties(key=key)["KEYS"] == text


def test_values_of_properties_become_text() -> None:
    found = sealed_properties(properties={"n": 1, "id": ORDER_ID, "minus": -5, "text": "x"})
    assert found["n"] == "1"
    assert found["id"] == str(ORDER_ID)
    assert (found["minus"], found["text"]) == ("-5", "x")


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        (
            {"key": "order 17"},
            "the key 'order 17' has a space, and RocketMQ separates keys by spaces, so that nobody would find it; "
            "write for example 'order-17', or for several keys key=['order', '17']",
        ),
        ({"key": ["a", "b c"]}, "the key 'b c' has a space"),
        ({"key": []}, "the list of keys is empty; leave key out for a message without one"),
        ({"key": True}, "the key is True of type bool, expected str, int or UUID; convert others to str"),
        ({"key": 1.5}, "the key is 1.5 of type float"),
        ({"key": b"order-17"}, "the key is b'order-17' of type bytes"),
        ({"key": [None]}, "the key is None of type NoneType"),
        ({"key": {"order": 17}}, "the key is {'order': 17} of type dict"),
        ({"properties": {"n": None}}, "property 'n' is None of type NoneType, expected str, int or UUID"),
        ({"properties": {"n": False}}, "property 'n' is False of type bool"),
        ({"properties": {"n": [1]}}, "property 'n' is [1] of type list"),
        ({"properties": {1: "n"}}, "the name of property 1 is of type int, expected str"),
        ({"tag": 5}, "the tag is 5 of type int, expected str"),
    ],
    ids=str,
)
def test_what_has_no_obvious_text_is_refused_with_a_sentence(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        sealed_properties(**wishes)
    assert sentence in str(refused.value)


def refused_calls(client: Any) -> dict[str, Callable[[], Any]]:
    """Calls of either client with arguments of other types, by the sentence that refuses them."""
    return {
        "cancel got None of type NoneType, expected the receipt of a send, or its text": lambda: client.cancel(None),
        "cancel got 17 of type int": lambda: client.cancel(17),
        "the key is None of type NoneType": lambda: client.cancel_key("orders", None, 5),
        "the key 'order 17' has a space": lambda: client.cancel_key("orders", "order 17", 5),
        "the time is '2033', expected a datetime": lambda: client.cancel_key("orders", "k", "2033"),
        "the topic is None of type NoneType, expected str": lambda: client.send(None, "x"),
        "the topic is 5 of type int": lambda: client.send_batch(5, []),
        "the body is of type dict, expected bytes or str": lambda: client.send("orders", {"a": 1}),
        "queue is '1' of type str, expected int": lambda: client.send("orders", "x", queue="1"),
        "the key 'a b' has a space": lambda: client.send("orders", "x", key="a b"),
        "a message of a batch is of type str, expected postdate.Outgoing": lambda: client.send_batch("orders", ["x"]),
        "property 'n' is None": lambda: client.send_batch("orders", [Outgoing("x", properties={"n": None})]),  # type: ignore[dict-item]
    }


def test_both_clients_refuse_arguments_before_they_connect() -> None:
    async def refuse_all() -> None:
        async with postdate.connect_async("127.0.0.1:1") as client:
            for sentence, call in refused_calls(client).items():
                with pytest.raises(UsageError, match=re.escape(sentence)):
                    await call()

    asyncio.run(refuse_all())
    with postdate.connect("127.0.0.1:1") as client:
        for sentence, call in refused_calls(client).items():
            with pytest.raises(UsageError, match=re.escape(sentence)):
                call()
