"""What peers are shown of places and secrets."""

import pytest

from postdate.config import Settings
from postdate.message import Host
from postdate.server.masking import hide_credentials, is_local, mask, mask_settings, shorten

HERE, ELSEWHERE = Host(b"\x7f\x00\x00\x01", 1), Host(b"\x0a\x00\x00\x07", 1)


def test_who_is_on_this_machine() -> None:
    mapped, loopback = bytes(10) + b"\xff\xff\x7f\x00\x00\x09", bytes(15) + b"\x01"
    assert [is_local(Host(address, 1)) for address in (HERE.address, mapped, loopback)] == [True] * 3
    assert not is_local(ELSEWHERE)
    assert not is_local(Host(bytes(10) + b"\xff\xff\x0a\x00\x00\x07", 1))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:secret@bucket/table", "s3://...@bucket/table"),
        ("cannot read abfs://x@y/t?sig=abc&se=1, tries again", "cannot read abfs://...@y/t?..., tries again"),
        ("listens on 127.0.0.1:9878 (process 7)", "listens on 127.0.0.1:9878 (process 7)"),
        ("why? a=b", "why? a=b"),
    ],
)
def test_credentials_are_shown_to_nobody(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown
    assert mask(text, HERE) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/var/lib/postdate/table", ".../table"),
        ("s3://key:secret@bucket/a/table/", "s3://.../table"),
        ("runs on local[*], table /home/x/t (process 7)", "runs on local[*], table .../t (process 7)"),
        ("runs on spark://master:7077", "runs on spark://.../master:7077"),
        ("12 messages/s, 3/4 done", "12 messages/s, 3/4 done"),
        ("no Java (java_home /opt/jdk: version 11)", "no Java (java_home .../jdk: version 11)"),
    ],
)  # fmt: skip
def test_over_the_network_a_place_is_its_last_part(text: str, shown: str) -> None:
    assert mask(text, ELSEWHERE) == shown
    assert mask({"a": [text], "n": 1}, ELSEWHERE) == {"a": [shown], "n": 1}


def test_settings_are_masked_too() -> None:
    settings = Settings(data="relative/data", table="s3://k:s@bucket/table", java_home="/opt/jdk")
    elsewhere, here = mask_settings(settings, ELSEWHERE), mask_settings(settings, HERE)
    assert [elsewhere[name] for name in ("data", "table", "java_home")] == [".../data", "s3://.../table", ".../jdk"]
    shown = [here[name] for name in ("data", "table", "java_home")]
    assert shown == ["relative/data", "s3://...@bucket/table", "/opt/jdk"]
    assert elsewhere["message_delay_level"] == settings.message_delay_level


def test_a_place_without_parts_stays() -> None:
    assert (shorten("/"), shorten("table"), shorten("/table")) == ("/", ".../table", ".../table")
