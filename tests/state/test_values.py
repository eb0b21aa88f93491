"""Key-value settings of operators, as a table."""

import json

from postdate.state.values import Values


def test_a_value_belongs_to_namespace_and_key() -> None:
    values = Values()
    values.put("ORDER", "orders", "a:4")
    values.put("ORDER", "bills", "a:8")
    values.put("OTHER", "orders", "")
    values.put("ORDER", "orders", "a:2")
    assert values.of("ORDER") == {"orders": "a:2", "bills": "a:8"}
    assert values.find("OTHER", "orders") == "", "an empty text is a value"
    assert (values.find("OTHER", "bills"), values.find("nowhere", "orders"), values.of("nowhere")) == (None, None, {})
    assert len(values) == 3


def test_a_deleted_value_is_gone_and_only_that() -> None:
    values = Values()
    for key in ("a", "b"):
        values.put("n", key, "x")
    values.delete("n", "a")
    values.delete("n", "a")
    values.delete("nowhere", "a")
    assert (values.of("n"), len(values)) == ({"b": "x"}, 1)
    values.delete("n", "b")
    assert (values.state(), len(values)) == ([], 0)


def test_what_is_given_out_is_a_copy() -> None:
    values = Values()
    values.put("n", "a", "x")
    values.of("n").clear()
    assert values.find("n", "a") == "x"


def test_the_state_comes_back_and_does_not_change_with_the_values() -> None:
    values = Values()
    values.put("n", "a", "x")
    values.put("m", "a", "y")
    state = values.state()
    text = json.dumps(state)
    values.put("n", "b", "z")
    assert json.dumps(state) == text
    again = Values()
    again.put("old", "old", "old")
    again.load(json.loads(text))
    assert again.state() == json.loads(text)
    assert len(again) == 2
