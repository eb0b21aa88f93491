"""Certificates for tests, made by the program openssl: an authority, and what it signs."""

import subprocess
from pathlib import Path
from typing import NamedTuple

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_LOCALHOST = "DNS:localhost,IP:127.0.0.1"


class Pair(NamedTuple):
    """The files of a certificate and its key, and the files that trust it."""

    certificate: str
    key: str
    ca: str

    def encrypt_key(self, file: Path) -> str:
        """Writes the key with a password into another file."""
        _openssl("pkcs8", "-topk8", "-in", self.key, "-passout", "pass:secret", "-out", str(file))
        return str(file)


class Authority:
    """Signs certificates. Makes its files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self.certificate, self._key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        _openssl(
            "req", "-x509", *_CURVE, "-keyout", self._key, "-out", self.certificate, "-days", "2",
            "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip

    def sign(self, name: str, common_name: str = "localhost", san: str = _LOCALHOST, days: int = 2) -> Pair:
        """A certificate and its key, in files of this name; with days below 0 it has expired."""
        certificate, key = str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        _openssl("req", *_CURVE, "-keyout", key, "-out", str(request), "-subj", f"/CN={common_name}")
        extensions.write_text(f"subjectAltName={san}\nbasicConstraints=CA:FALSE\n")
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
            "-out", certificate, "-days", str(days), "-extfile", str(extensions),
        )  # fmt: skip
        return Pair(certificate, key, self.certificate)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
