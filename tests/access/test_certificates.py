"""Self-signed certificates."""

import os
import ssl
from pathlib import Path

import pytest

from postdate.access.certificates import LOCAL_FOLDER, local_certificate, make_certificate
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


def test_the_certificate_of_this_machine_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    files = local_certificate(tmp_path)
    before = Path(files.certificate).read_bytes()
    assert local_certificate(tmp_path) == files
    assert Path(files.certificate).read_bytes() == before
    assert Path(files.certificate).parent == tmp_path / LOCAL_FOLDER
    assert (tmp_path / LOCAL_FOLDER).stat().st_mode & 0o777 == 0o700
    assert Path(files.key).stat().st_mode & 0o777 == 0o600
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=files.certificate)
    for name in ("localhost", "127.0.0.1", "::1"):
        shake_hands(server, client, name)


def test_an_old_certificate_of_this_machine_is_made_anew(tmp_path: Path) -> None:
    files = local_certificate(tmp_path)
    before = Path(files.certificate).read_bytes()
    soon_over_s = Path(files.certificate).stat().st_mtime - 740 * 86_400
    os.utime(files.certificate, (soon_over_s, soon_over_s))
    local_certificate(tmp_path)
    assert Path(files.certificate).read_bytes() != before


def test_half_a_certificate_of_this_machine_is_made_anew(tmp_path: Path) -> None:
    files = local_certificate(tmp_path)
    Path(files.key).unlink()
    assert Path(local_certificate(tmp_path).key).exists()
