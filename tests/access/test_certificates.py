"""Self-signed certificates."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest

from postdate.access.certificates import LOCAL_FOLDER, LocalCertificate, make_certificate
from postdate.errors import ProtocolError, UsageError
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


def paths_of(folder: Path) -> tuple[Path, Path]:
    return folder / LOCAL_FOLDER / CERTIFICATE_FILE, folder / LOCAL_FOLDER / KEY_FILE


def find_context(folder: Path) -> ssl.SSLContext:
    async def find() -> ssl.SSLContext:
        certificate = LocalCertificate(folder)
        first, second = await asyncio.gather(certificate.find_context(), certificate.find_context())
        assert first is second, "it is made once for all who wait"
        return first

    return asyncio.run(find())


def test_the_certificate_of_this_machine_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    server = find_context(tmp_path)
    certificate, key = paths_of(tmp_path)
    before = certificate.read_bytes()
    find_context(tmp_path)
    assert certificate.read_bytes() == before
    assert certificate.parent.stat().st_mode & 0o777 == 0o700
    assert key.stat().st_mode & 0o777 == 0o600
    client = ssl.create_default_context(cafile=certificate)
    for name in ("localhost", "127.0.0.1", "::1"):
        shake_hands(server, client, name)


def test_an_old_certificate_of_this_machine_is_made_anew(tmp_path: Path) -> None:
    find_context(tmp_path)
    certificate, _ = paths_of(tmp_path)
    before = certificate.read_bytes()
    soon_over_s = certificate.stat().st_mtime - 740 * 86_400
    os.utime(certificate, (soon_over_s, soon_over_s))
    find_context(tmp_path)
    assert certificate.read_bytes() != before


def test_half_a_certificate_of_this_machine_is_made_anew(tmp_path: Path) -> None:
    find_context(tmp_path)
    _, key = paths_of(tmp_path)
    key.unlink()
    find_context(tmp_path)
    assert key.exists()


def test_without_the_package_there_is_no_certificate_and_a_sentence_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "cryptography.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(missing), prepend=os.pathsep)
    with pytest.raises(ProtocolError, match=r"no certificate for this machine: .* needs postdate.tls."):
        find_context(tmp_path)
