"""What a message may contain, and when it is due."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import IllegalMessage, UsageError
from postdate.keys import key_hash
from postdate.message import (
    BODY_BYTES_MAX_DEFAULT,
    DEFAULT_LEVELS_TEXT,
    DELAY_MS_MAX_DEFAULT,
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    PROPERTIES_BYTES_MAX,
    TRIES_MAX,
    DelayLevels,
    Due,
    Host,
    Message,
    UniqueKeys,
    check_group,
    check_message,
    check_topic,
    decode_properties,
    due,
    encode_properties,
    first_key,
    refuse_internal,
    tag_hash,
)

AT_ONCE = Due(0, 0)

NOW_MS = 1_700_000_000_000
LEVELS = DelayLevels.parse(DEFAULT_LEVELS_TEXT)
MESSAGE = Message("orders", b"body")

property_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1)
property_dicts = st.dictionaries(property_texts, property_texts, max_size=8)


def due_of(**properties: str) -> Due:
    return due(properties, NOW_MS, LEVELS, DELAY_MS_MAX_DEFAULT)


# ---------------------------------------------------------------------------------------------------- properties


@settings(deadline=None)
@given(property_dicts)
def test_properties_come_back_as_they_were(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_properties_or_an_illegal_message(data: bytes) -> None:
    try:
        properties = decode_properties(data)
    except IllegalMessage:
        return
    assert all(name and value for name, value in properties.items())


def test_properties_are_encoded_with_a_separator_after_each() -> None:
    assert encode_properties({"TAGS": "TagA", "é": "1"}) == b"TAGS\x01TagA\x02\xc3\xa9\x011\x02"


def test_no_properties_are_no_bytes() -> None:
    assert encode_properties({}) == b""
    assert decode_properties(b"") == {}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\x011\x02b\x012", {"a": "1", "b": "2"}),
        (b"a\x01\x02b\x012\x02", {"b": "2"}),
        (b"\x011\x02b\x012\x02", {"b": "2"}),
        (b"ab\x02\x02\x01\x02b\x012\x02", {"b": "2"}),
        (b"a\x011\x012\x02", {"a": "1\x012"}),
        (b"a\x011\x02a\x012\x02", {"a": "2"}),
    ],
    ids=["no last separator", "empty value", "empty name", "no value", "separator in value", "twice"],
)
def test_odd_properties_are_read_as_rocketmq_reads_them(data: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(data) == expected


@pytest.mark.parametrize(
    "properties",
    [{"": "1"}, {"a": ""}, {"a\x01": "1"}, {"a\x02": "1"}, {"a": "\x01"}, {"a": "1\x02b\x012"}, {"a": "\ud800"}],
)
def test_properties_that_would_not_come_back_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(IllegalMessage):
        encode_properties(properties)


def test_properties_that_are_not_utf8_are_refused_with_the_place() -> None:
    with pytest.raises(IllegalMessage, match="byte 2"):
        decode_properties(b"a\x01\xff\x02")


@pytest.mark.parametrize("name", sorted(INTERNAL_PROPERTIES))
def test_an_internal_property_is_refused_by_name(name: str) -> None:
    with pytest.raises(IllegalMessage, match=f"property {name} = '1'"):
        refuse_internal({"TAGS": "TagA", name: "1"})


def test_a_producers_own_properties_are_not_internal() -> None:
    refuse_internal({"TAGS": "TagA", "DELAY": "3", "TIMER_DELAY_MS": "5", "TIMER_DEL_UNIQKEY": "k", "mine": "1"})


@pytest.mark.parametrize(
    ("keys", "expected"), [("", ""), (" ", ""), ("one", "one"), ("one two", "one"), ("  one  two", "one")]
)
def test_first_key_is_the_text_before_a_space(keys: str, expected: str) -> None:
    assert first_key(keys) == expected


# -------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("name", ["a", "Orders_2-x", "%RETRY%group", "a|b", "t" * 127, "%RETRY%" + "g" * 248])
def test_a_good_topic_passes(name: str) -> None:
    check_topic(name)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a.b", "тема", "a/b", "../x"])
def test_a_topic_with_other_characters_is_refused(name: str) -> None:
    with pytest.raises(IllegalMessage, match="expected one or more of the characters"):
        check_topic(name)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("t" * 128, 127), ("%RETRY%" + "g" * 249, 255), ("%DLQ%" + "g" * 251, 255), ("%OTHER%" * 20, 127)],
)
def test_a_long_topic_is_refused_with_the_limit(name: str, limit: int) -> None:
    with pytest.raises(IllegalMessage, match=rf"has {len(name)} characters, the limit is {limit}$"):
        check_topic(name)


def test_a_group_has_at_most_120_characters() -> None:
    check_group("g" * 120)
    with pytest.raises(IllegalMessage, match=r"group 'gggg.* the limit is 120"):
        check_group("g" * 121)
    with pytest.raises(IllegalMessage, match="group 'a b'"):
        check_group("a b")


def test_messages_at_every_limit_pass() -> None:
    low, high = -(2**31), 2**31 - 1
    check_message(MESSAGE._replace(body=bytes(BODY_BYTES_MAX_DEFAULT), properties=bytes(PROPERTIES_BYTES_MAX)))
    check_message(MESSAGE._replace(queue_id=high, flag=low, sys_flag=low, born_at_ms=-(2**63), reconsume_times=0))
    check_message(MESSAGE._replace(reconsume_times=TRIES_MAX))
    check_message(MESSAGE._replace(prepared_offset=2**63 - 1, born_host=Host(bytes(16), 65535)))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (MESSAGE._replace(body=bytes(BODY_BYTES_MAX_DEFAULT + 1)), "body has 4194305 bytes, the limit is 4194304"),
        (MESSAGE._replace(properties=bytes(32768)), "properties have 32768 bytes, the limit is 32767"),
        (MESSAGE._replace(queue_id=-1), "queue_id is -1, expected 0 or more"),
        (MESSAGE._replace(queue_id=2**31), "queue_id is 2147483648, expected 32 bits"),
        (MESSAGE._replace(flag=2**31), "flag is 2147483648, expected 32 bits"),
        (MESSAGE._replace(sys_flag=-(2**31) - 1), "sys_flag is -2147483649, expected 32 bits"),
        (MESSAGE._replace(reconsume_times=2**40), "reconsume_times is 1099511627776, expected 32 bits"),
        (MESSAGE._replace(reconsume_times=TRIES_MAX + 1), "reconsume_times is 1000001, expected 0 to 1000000"),
        (MESSAGE._replace(reconsume_times=-1), "reconsume_times is -1, expected 0 to 1000000"),
        (MESSAGE._replace(born_at_ms=2**63), "born_at_ms is 9223372036854775808, expected 64 bits"),
        (MESSAGE._replace(prepared_offset=2**63), "prepared_offset is 9223372036854775808, expected 64 bits"),
        (MESSAGE._replace(born_host=Host(b"abc", 1)), "address of 3 bytes, expected 4 or 16"),
        (MESSAGE._replace(born_host=Host(bytes(4), 65536)), "port 65536, expected 0 to 65535"),
        (MESSAGE._replace(born_host=Host(bytes(4), -1)), "port -1, expected 0 to 65535"),
    ],
)
def test_a_message_beyond_a_limit_is_refused_with_field_value_and_limit(bad: Message, said: str) -> None:
    with pytest.raises(IllegalMessage, match=said):
        check_message(bad)


def test_the_limits_of_body_and_properties_are_the_callers() -> None:
    check_message(MESSAGE, body_bytes_max=4)
    with pytest.raises(IllegalMessage, match="body has 4 bytes, the limit is 3"):
        check_message(MESSAGE, body_bytes_max=3)
    with pytest.raises(IllegalMessage, match="properties have 5 bytes, the limit is 4"):
        check_message(MESSAGE._replace(properties=b"a\x01bc\x02"), properties_bytes_max=4)


# -------------------------------------------------------------------------------------------------- hashes and keys


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("TagA", 2598919),
        ("hello", 99162322),
        ("AaAa", 2031744),
        ("BBBB", 2031744),
        ("polygenelubricants", -2147483648),
        ("é", 0xE9),
        ("\U0001f600", 31 * 0xD83D + 0xDE00),
        ("\ud800", 0xD800),
    ],
)
def test_tag_hash_is_javas(tag: str, expected: int) -> None:
    assert tag_hash(tag) == expected


@settings(deadline=None)
@given(st.text())
def test_tag_hash_fits_a_signed_int32(tag: str) -> None:
    assert -(2**31) <= tag_hash(tag) < 2**31


def test_key_hash_is_xxh3_of_utf8() -> None:
    assert key_hash("a") == 0xE6C632B61E964E1F


def test_no_key_has_hash_0_and_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.keys.xxh3_64_intdigest", lambda _: 0)
    assert key_hash("") == 0
    assert key_hash("a key whose hash happens to be 0") == 1


def test_unique_key_is_spelled_field_by_field() -> None:
    march_first_2024_ms = 1_709_251_200_000
    keys = UniqueKeys(b"\x7f\x00\x00\x01", process_id=0x1234, salt=0xCAFEBABE)
    assert keys.next(march_first_2024_ms + 5) == "7F000001" + "1234" + "CAFEBABE" + "00000005" + "0000"
    assert keys.next(march_first_2024_ms + 6) == "7F000001" + "1234" + "CAFEBABE" + "00000006" + "0001"


def test_unique_key_starts_each_month_anew() -> None:
    january_first_2024_ms = 1_704_067_200_000
    keys = UniqueKeys(bytes(4), 0, 0)
    assert keys.next(january_first_2024_ms - 1)[-12:-4] == f"{31 * 86_400_000 - 1:08X}"
    assert keys.next(january_first_2024_ms)[-12:-4] == "00000000"
    assert keys.next(january_first_2024_ms - 1)[-12:-4] == f"{31 * 86_400_000 - 1:08X}"


def test_unique_key_of_ipv6_has_56_digits_and_large_numbers_are_cut() -> None:
    key = UniqueKeys(bytes(range(16)), process_id=0x1FFFF, salt=-1).next(NOW_MS)
    assert len(key) == 56
    assert key[:44] == "000102030405060708090A0B0C0D0E0F" + "FFFF" + "FFFFFFFF"


def test_unique_key_counter_wraps_after_65536() -> None:
    keys = UniqueKeys(bytes(4), 0, 0)
    made = [keys.next(NOW_MS) for _ in range(65_536)]
    assert len(set(made)) == 65_536
    assert keys.next(NOW_MS) == made[0]


def test_unique_keys_need_an_address_of_4_or_16_bytes() -> None:
    with pytest.raises(UsageError, match="5 bytes"):
        UniqueKeys(bytes(5), 1, 1)


# --------------------------------------------------------------------------------------------------------- levels


def test_default_levels_are_rocketmqs_eighteen() -> None:
    assert LEVELS.count == 18
    assert [LEVELS.delay_ms(level) for level in (1, 4, 5, 14, 17, 18)] == [
        1000, 30_000, 60_000, 600_000, 3_600_000, 7_200_000,
    ]  # fmt: skip


def test_levels_are_as_many_as_a_byte_can_tell() -> None:
    assert len(DelayLevels.parse("1s " * 255).delays_ms) == 255
    with pytest.raises(UsageError, match="there are 256 delay levels, the limit is 255"):
        DelayLevels.parse("1s " * 256)


def test_levels_know_days() -> None:
    assert DelayLevels.parse(" 2d  3s ").delays_ms == (172_800_000, 3000)


def test_a_level_beyond_the_last_has_the_last_ones_delay() -> None:
    assert LEVELS.delay_ms(19) == LEVELS.delay_ms(18)


@pytest.mark.parametrize("level", [0, -1])
def test_level_below_1_has_no_delay(level: int) -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        LEVELS.delay_ms(level)


@pytest.mark.parametrize("text", ["", "  ", "1", "s", "1s 5x", "1s,5s", "-1s", "0s", "1.5s", "1S", "٣s", "9999999999s"])
def test_levels_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="delay level"):
        DelayLevels.parse(text)


# ------------------------------------------------------------------------------------------------------------ due


def test_a_message_without_delay_is_due_at_once() -> None:
    assert due_of() == due_of(TAGS="TagA") == AT_ONCE == (0, 0)


def test_each_property_has_its_unit() -> None:
    assert due_of(DELAY="3") == (NOW_MS + 10_000, 3)
    assert due_of(TIMER_DELAY_SEC="7") == (NOW_MS + 7000, 0)
    assert due_of(TIMER_DELAY_MS="7") == (NOW_MS + 7, 0)
    assert due_of(TIMER_DELIVER_MS=str(NOW_MS + 7)) == (NOW_MS + 7, 0)
    assert due_of(__STARTDELIVERTIME=str(NOW_MS + 7)) == (NOW_MS + 7, 0)


def test_the_first_property_wins_and_the_others_are_not_read() -> None:
    rest = {"__STARTDELIVERTIME": "nonsense"}
    assert due_of(TIMER_DELIVER_MS=str(NOW_MS + 7), **rest) == (NOW_MS + 7, 0)
    rest["TIMER_DELIVER_MS"] = "nonsense"
    assert due_of(TIMER_DELAY_MS="7", **rest) == (NOW_MS + 7, 0)
    rest["TIMER_DELAY_MS"] = "nonsense"
    assert due_of(TIMER_DELAY_SEC="7", **rest) == (NOW_MS + 7000, 0)
    rest["TIMER_DELAY_SEC"] = "nonsense"
    assert due_of(DELAY="1", **rest) == (NOW_MS + 1000, 1)


def test_a_timer_that_has_come_wins_over_one_that_has_not() -> None:
    assert due_of(TIMER_DELAY_SEC="0", TIMER_DELAY_MS="7") == AT_ONCE


@pytest.mark.parametrize("level", ["0", "-1", "-9223372036854775808"])
def test_level_0_or_less_leaves_the_decision_to_the_timers(level: str) -> None:
    assert due_of(DELAY=level) == AT_ONCE
    assert due_of(DELAY=level, TIMER_DELAY_MS="7") == (NOW_MS + 7, 0)


@pytest.mark.parametrize("level", ["18", "19", "9223372036854775807"])
def test_level_is_clamped_to_the_last(level: str) -> None:
    assert due_of(DELAY=level) == (NOW_MS + 7_200_000, 18)


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": "-1"},
        {"TIMER_DELAY_SEC": "-9223372036854775808"},
        {"TIMER_DELAY_MS": "0"},
        {"TIMER_DELAY_MS": "-1"},
        {"TIMER_DELIVER_MS": "0"},
        {"TIMER_DELIVER_MS": "-5"},
        {"TIMER_DELIVER_MS": str(NOW_MS - 1)},
        {"TIMER_DELIVER_MS": str(NOW_MS)},
        {"TIMER_DELIVER_MS": str(NOW_MS - 1), "__STARTDELIVERTIME": str(NOW_MS + 1)},
        {"__STARTDELIVERTIME": "0"},
        {"__STARTDELIVERTIME": str(NOW_MS)},
    ],
)
def test_a_due_time_at_or_before_now_is_at_once(properties: dict[str, str]) -> None:
    assert due_of(**properties) == AT_ONCE


def test_no_due_time_is_rounded() -> None:
    assert due_of(TIMER_DELIVER_MS=str(NOW_MS + 1)) == (NOW_MS + 1, 0)
    assert due_of(TIMER_DELAY_MS="+1001") == (NOW_MS + 1001, 0)


def test_the_longest_delay_passes() -> None:
    assert due({"TIMER_DELAY_SEC": "3"}, NOW_MS, LEVELS, 3000) == (NOW_MS + 3000, 0)
    assert due({"TIMER_DELAY_MS": "3000"}, NOW_MS, LEVELS, 3000) == (NOW_MS + 3000, 0)
    assert due({"TIMER_DELIVER_MS": str(NOW_MS + 3000)}, NOW_MS, LEVELS, 3000) == (NOW_MS + 3000, 0)
    assert due({"__STARTDELIVERTIME": str(NOW_MS + 3000)}, NOW_MS, LEVELS, 3000) == (NOW_MS + 3000, 0)
    assert due({"DELAY": "1"}, NOW_MS, LEVELS, 1000) == (NOW_MS + 1000, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMER_DELAY_SEC", "4"),
        ("TIMER_DELAY_SEC", "9223372036854775807"),
        ("TIMER_DELAY_MS", "3001"),
        ("TIMER_DELIVER_MS", str(NOW_MS + 3001)),
        ("TIMER_DELIVER_MS", "9223372036854775807"),
        ("__STARTDELIVERTIME", str(NOW_MS + 3001)),
        ("DELAY", "2"),
    ],
)
def test_a_longer_delay_is_refused_with_property_value_and_limit(name: str, value: str) -> None:
    with pytest.raises(IllegalMessage, match=rf"property {name} = '{value}' .* the limit is 3000 ms"):
        due({name: value}, NOW_MS, LEVELS, 3000)


@pytest.mark.parametrize("name", sorted(DELAY_PROPERTIES))
@pytest.mark.parametrize(
    "value",
    ["", "soon", "1.5", " 1", "1_0", "0x1", "1e3", "-", "٣", "1\n", "9223372036854775808", "-9223372036854775809"],
)
def test_what_is_no_int64_is_refused_with_property_and_value(name: str, value: str) -> None:
    with pytest.raises(IllegalMessage) as refusal:
        due_of(**{name: value})
    assert str(refusal.value) == f"property {name} = {value!r}, expected a whole number of at most 64 bits"


def test_a_huge_value_is_cut_in_the_refusal() -> None:
    with pytest.raises(IllegalMessage, match=r"\(30000 characters\)") as refusal:
        due_of(TIMER_DELAY_MS="9" * 30_000)
    assert len(str(refusal.value)) < 200


def test_the_longest_default_delay_is_ten_years() -> None:
    assert due_of(TIMER_DELAY_SEC=str(3652 * 86_400)).at_ms == NOW_MS + 3652 * 86_400_000
    with pytest.raises(IllegalMessage):
        due_of(TIMER_DELAY_SEC=str(3653 * 86_400))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(DELAY_PROPERTIES)), st.text()))
def test_due_is_at_once_or_ahead_within_the_limit_or_refused(properties: dict[str, str]) -> None:
    try:
        at_ms, level = due(properties, NOW_MS, LEVELS, DELAY_MS_MAX_DEFAULT)
    except IllegalMessage:
        return
    assert at_ms == 0 or 0 < at_ms - NOW_MS <= DELAY_MS_MAX_DEFAULT
    assert 0 <= level <= LEVELS.count
