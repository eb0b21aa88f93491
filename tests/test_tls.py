"""Contexts of TLS: what is refused, in which words."""

import ssl
from pathlib import Path

import pytest

from postdate.config import CLIENT_CERTIFICATES
from postdate.errors import UsageError
from postdate.tls import Renewed, ServerFiles, client_context, name_in, server_context
from tests.support.certificates import Authority, Pair


def test_only_tls_1_2_and_up_is_spoken(pair: Pair) -> None:
    for context in (server_context(ServerFiles(pair.certificate, pair.key)), client_context(ca_file=pair.ca)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_client_compares_names_and_trusts_the_system_where_it_is_given_nothing(pair: Pair) -> None:
    for context in (client_context(), client_context(ca_file=pair.ca)):
        assert context.check_hostname
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert client_context(ca_file=pair.ca).cert_store_stats()["x509_ca"] == 1


@pytest.mark.parametrize("wanted", CLIENT_CERTIFICATES)
def test_what_a_server_wants_to_see_of_clients(pair: Pair, wanted: str) -> None:
    context = server_context(ServerFiles(pair.certificate, pair.key, pair.ca, wanted))
    expected = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
    assert context.verify_mode == expected[wanted]


def test_files_that_cannot_be_used_are_refused_in_a_sentence(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    other = authority.sign("other")
    missing, empty = str(tmp_path / "missing.pem"), tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for certificate, key, sentence in (
        (pair.certificate, other.key, "key values mismatch; expected two PEM files that belong together"),
        (pair.key, pair.key, "no PEM; expected two PEM files that belong together"),
        (str(empty), pair.key, "no PEM; expected two PEM files that belong together"),
        (missing, pair.key, r"missing.pem \(certificate\) cannot be read: No such file or directory"),
        (pair.certificate, str(tmp_path), r"\(key\) cannot be read: Is a directory"),
    ):
        with pytest.raises(UsageError, match=sentence):
            server_context(ServerFiles(certificate, key))
    with pytest.raises(UsageError, match="has no certificate of an authority"):
        client_context(ca_file=str(empty))
    with pytest.raises(UsageError, match="has no certificate beside it"):
        client_context(key_file=pair.key)


def test_a_key_with_a_password_is_refused_and_asks_nobody(tmp_path: Path, pair: Pair) -> None:
    encrypted = pair.encrypt_key(tmp_path / "encrypted.key")
    with pytest.raises(UsageError, match=r"encrypted\.key is encrypted; expected one without a password"):
        server_context(ServerFiles(pair.certificate, encrypted))


def test_a_file_that_is_gone_leaves_the_context_in_place(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.sign("gone")
    renewed = Renewed(ServerFiles(files.certificate, files.key))
    before = renewed.context
    Path(files.key).unlink()
    assert [renewed.look() for _ in range(3)] == [False] * 3
    assert renewed.context is before
    assert caplog.text.count("cannot be read") == 1
    authority.sign("gone")
    assert renewed.look()
    assert renewed.context is not before


def test_a_name_is_the_common_name_of_the_subject() -> None:
    subject = ((("countryName", "DE"),), (("organizationName", "Acme"), ("commonName", "alice")))
    assert name_in({"subject": subject}) == "alice"
    assert [name_in(found) for found in (None, {}, {"subject": ()}, {"subject": ((("countryName", "DE"),),)})] == [
        ""
    ] * 4
