"""Signatures: what is signed, and what is refused."""

import hmac
from base64 import b64encode
from hashlib import sha1

import pytest

from postdate.wire.signature import (
    ACCESS_KEY,
    SECURITY_TOKEN,
    SIGNATURE,
    CallCredentials,
    Credentials,
    SigningKey,
    is_signed,
    parse_authorization,
    sign,
    signature,
)

ALICE = Credentials("alice", "wonderland")
FIELDS = {"topic": "orders", "queueId": "3", "AccessKey": "alice"}


def hmac_sha1(secret: bytes, content: bytes) -> str:
    return b64encode(hmac.new(secret, content, sha1).digest()).decode()


def test_values_are_signed_in_the_order_of_names_with_the_body() -> None:
    assert signature(FIELDS, b"body", "wonderland") == hmac_sha1(b"wonderland", b"alice3ordersbody")


def test_the_signature_itself_is_not_signed() -> None:
    assert signature(FIELDS | {SIGNATURE: "anything"}, b"", "wonderland") == signature(FIELDS, b"", "wonderland")


def test_bare_numbers_and_flags_count_as_java_writes_them() -> None:
    bare = {"queueId": 3, "order": True, "batch": False}
    text = {"queueId": "3", "order": "true", "batch": "false"}
    assert signature(bare, b"", "s") == signature(text, b"", "s")


def test_a_signed_request_is_accepted_with_its_own_secret_alone() -> None:
    fields = sign({"topic": "orders", "none": None}, b"body", ALICE)
    assert fields[ACCESS_KEY] == "alice"
    assert "none" not in fields
    assert is_signed(fields, b"body", "wonderland")
    assert not is_signed(fields, b"body", "looking-glass")


def test_a_security_token_is_signed() -> None:
    fields = sign({}, b"", Credentials("alice", "wonderland", "token"))
    assert fields[SECURITY_TOKEN] == "token"
    assert is_signed(fields, b"", "wonderland")
    assert not is_signed(fields | {SECURITY_TOKEN: "other"}, b"", "wonderland")


@pytest.mark.parametrize(
    "change", [{"topic": "others"}, {SIGNATURE: ""}, {SIGNATURE: "ü"}, {SIGNATURE: 7}, {"extra": "x"}, {"n": [1]}]
)
def test_a_changed_request_is_refused(change: dict[str, object]) -> None:
    assert not is_signed(sign({"topic": "orders"}, b"body", ALICE) | change, b"body", "wonderland")


def test_a_changed_body_and_a_missing_signature_are_refused() -> None:
    fields = sign({"topic": "orders"}, b"body", ALICE)
    assert not is_signed(fields, b"other", "wonderland")
    del fields[SIGNATURE]
    assert not is_signed(fields, b"body", "wonderland")


def test_secrets_are_not_shown() -> None:
    assert "wonderland" not in repr(ALICE)


# -- calls over gRPC --------------------------------------------------------------------------------------------------

DATE = "20300101T000000Z"
CALL_SIGNATURE = hmac.new(b"wonderland", DATE.encode(), sha1).hexdigest()


def authorization(credential: str = "alice", signed: str = CALL_SIGNATURE) -> str:
    return f"MQv2-HMAC-SHA1 Credential={credential}, SignedHeaders=x-mq-date-time, Signature={signed}"


@pytest.mark.parametrize(
    "text",
    [authorization(), authorization("alice/cn-hangzhou/Rocketmq"), authorization(signed=CALL_SIGNATURE.upper()),
     authorization().replace(", ", ","), f"  {authorization()} "],
)  # fmt: skip
def test_a_call_is_signed_by_its_time(text: str) -> None:
    found = parse_authorization(text, DATE)
    assert found == CallCredentials("alice", bytes.fromhex(CALL_SIGNATURE), DATE)
    assert SigningKey("wonderland").has_signed(found)
    assert not SigningKey("looking-glass").has_signed(found)
    assert not SigningKey("wonderland").has_signed(found._replace(date_time="20300101T000001Z"))


@pytest.mark.parametrize("signed", ["", CALL_SIGNATURE[:-2], CALL_SIGNATURE + "00"])
def test_a_call_with_half_a_signature_is_not_signed(signed: str) -> None:
    found = parse_authorization(authorization(signed=signed), DATE)
    assert found is not None
    assert not SigningKey("wonderland").has_signed(found)


@pytest.mark.parametrize(
    "text",
    ["", "MQv2-HMAC-SHA1", authorization(""), authorization("/region"), authorization(signed="no hex"),
     authorization().replace("SHA1", "SHA256"), authorization().replace("Credential", "Name"), "Basic YTpi", ",=,="],
)  # fmt: skip
def test_what_is_no_authorization_of_rocketmq_names_nobody(text: str) -> None:
    assert parse_authorization(text, DATE) is None


def test_a_long_secret_signs_calls_as_every_hmac_does() -> None:
    secret = "s" * 100
    signed = hmac.new(secret.encode(), DATE.encode(), sha1).digest()
    assert SigningKey(secret).has_signed(CallCredentials("alice", signed, DATE))
