"""Makes a self-signed certificate for a broker's names: enough for clients that are given it as their CA.

It needs the package cryptography, which nothing else here does.
"""

import asyncio
import ipaddress
import os
import ssl
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from postdate.clock import SystemClock
from postdate.errors import ProtocolError, UsageError
from postdate.process import make_private_folder
from postdate.tls import CERTIFICATE_FILE, KEY_FILE, ServerFiles, server_context

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


class LocalCertificate:
    """The certificate of a data folder for this machine alone. It is made once, beside the start of a broker and by a
    process of its own: loading what makes it would slow the start, and stay in the broker's memory. Clients that speak
    TLS wait for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / LOCAL_FOLDER
        self._paths = [self._folder / name for name in (CERTIFICATE_FILE, KEY_FILE)]
        self._lock = asyncio.Lock()
        self._context: ssl.SSLContext | None = None

    async def find_context(self) -> ssl.SSLContext:
        """Raises ProtocolError where what makes it is not installed."""
        async with self._lock:
            if self._context is None:
                if not self._is_fresh():
                    await asyncio.to_thread(self._make)
                self._context = server_context(ServerFiles(*map(str, self._paths)))
            return self._context

    def _is_fresh(self) -> bool:
        now_s = SystemClock().now_ms() / 1_000
        is_there = all(path.exists() for path in self._paths)
        return is_there and now_s - self._paths[0].stat().st_mtime < _RENEWED_AFTER_S

    def _make(self) -> None:
        make_private_folder(self._folder)
        for path in self._paths:
            path.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-m", __name__, self._folder], capture_output=True, text=True)
        if done.returncode:
            raise ProtocolError(f"there is no certificate for this machine: {done.stderr.strip()}")


def main(folder: str) -> int:
    """Makes the certificate of a LocalCertificate, in its folder."""
    try:
        make_certificate(Path(folder), _LOCAL_NAMES)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _write(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
