"""Makes a self-signed certificate for a broker's names: enough for clients that are given it as their CA.

It needs the package cryptography, which nothing else here does.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from postdate.clock import SystemClock
from postdate.errors import UsageError
from postdate.process import make_private_folder
from postdate.tls import CERTIFICATE_FILE, KEY_FILE, ServerFiles

_DAYS = 825  # the longest that every client of TLS accepts
_RENEWED_AFTER_S = (_DAYS - 90) * 86_400  # a local one is made anew some months before it ends
LOCAL_FOLDER = "local"  # of a data folder: the certificate for this machine alone
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_NAME_CHARACTERS_MAX = 64  # of a common name


def make_certificate(folder: Path, names: Sequence[str]) -> Path:
    """Makes a certificate and its key for names and addresses; returns where the certificate is. Raises UsageError
    where there is one already, and where the package that makes it is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise UsageError(
            "--self-signed needs postdate[tls] (pip install 'postdate[tls]'); or bring a certificate of your own"
        ) from error

    def general_name(name: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            return x509.DNSName(name)

    certificate_path, key_path = folder / CERTIFICATE_FILE, folder / KEY_FILE
    for path in (certificate_path, key_path):
        if path.exists():
            raise UsageError(f"{path} exists: remove it, or use it")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:_NAME_CHARACTERS_MAX])])
    begins = datetime.fromtimestamp(SystemClock().now_ms() // 1_000, UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(
        key_path,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        0o600,
    )
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate_path


def local_certificate(folder: Path) -> ServerFiles:
    """Returns the certificate of a data folder for this machine alone; makes it where there is none, or an old one.
    Raises UsageError as `make_certificate` does.
    """
    own = folder / LOCAL_FOLDER
    paths = [own / name for name in (CERTIFICATE_FILE, KEY_FILE)]
    now_s = SystemClock().now_ms() / 1_000
    if all(path.exists() for path in paths) and now_s - paths[0].stat().st_mtime < _RENEWED_AFTER_S:
        return ServerFiles(*map(str, paths))
    make_private_folder(own)
    for path in paths:
        path.unlink(missing_ok=True)
    make_certificate(own, _LOCAL_NAMES)
    return ServerFiles(*map(str, paths))


def _write(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
