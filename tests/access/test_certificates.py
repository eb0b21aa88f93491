"""Self-signed certificates."""

import ssl
from pathlib import Path

import pytest

from postdate.access.certificates import make_certificate
from postdate.errors import UsageError
from postdate.tls import CERTIFICATE_FILE, KEY_FILE


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server, server_hostname=name)]
    ends.append(server.wrap_bio(to_server, to_client, server_side=True))
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_a_client_that_has_it_as_its_ca_trusts_it_for_its_names(tmp_path: Path) -> None:
    path = make_certificate(tmp_path, ["broker.internal", "10.0.0.7", "::1"])
    assert path == tmp_path / CERTIFICATE_FILE
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path, tmp_path / KEY_FILE)
    client = ssl.create_default_context(cafile=str(path))
    for name in ("broker.internal", "10.0.0.7", "::1"):
        shake_hands(server, client, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, ssl.create_default_context(), "broker.internal")


def test_only_the_owner_can_read_the_key(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["localhost"])
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_certificate_that_is_there_stays(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["localhost"])
    before = (tmp_path / CERTIFICATE_FILE).read_bytes()
    with pytest.raises(UsageError, match="exists: remove it, or use it"):
        make_certificate(tmp_path, ["localhost"])
    assert (tmp_path / CERTIFICATE_FILE).read_bytes() == before
