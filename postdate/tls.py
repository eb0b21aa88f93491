"""TLS for both ends: contexts made from files, and renewed when the files change.

A server shows one certificate on all its ports. Its files are looked at every few seconds: when they have changed, new
connections get a new context, and those that are open keep theirs. Files that do not belong together, as while they are
being replaced, leave the old context in place.
"""

import logging
import ssl
from pathlib import Path
from typing import NamedTuple, NoReturn

from postdate.errors import UsageError

logger = logging.getLogger("postdate.tls")

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"  # in the data folder, where the settings name no others
ALPN = "h2"  # what clients of gRPC insist on; those of the older protocol name nothing
RENEW_MS = 5_000  # how often the files of a server are looked at

_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class ServerFiles(NamedTuple):
    """What a server shows, and what it wants to see: PEM files, empty where there is none."""

    certificate: str
    key: str
    client_ca: str = ""
    client_certificates: str = "none"


def server_files(
    folder: Path, certificate: str, key: str, client_ca: str = "", client_certificates: str = "none"
) -> ServerFiles:
    """Returns the files that settings name, else those of the data folder."""
    if not certificate:
        certificate, key = str(folder / CERTIFICATE_FILE), str(folder / KEY_FILE)
    return ServerFiles(certificate, key, client_ca, client_certificates)


def server_context(files: ServerFiles) -> ssl.SSLContext:
    """Returns the context of a server. Raises UsageError for files that cannot be read or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiating costs the server more than the client. Sessions last for hours here: nobody needs to resume one, and
    # a resumed one would outlive the certificates that it was made with.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    context.set_alpn_protocols([ALPN])
    _load_pair(context, files.certificate, files.key)
    if files.client_certificates != "none":
        _load_authorities(context, files.client_ca)
    context.verify_mode = _VERIFY[files.client_certificates]
    return context


def client_context(*, ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """Returns the context of a client: it trusts the authorities in a file, else the system's, and compares the name of
    the host; it shows a certificate if it is given one. Raises UsageError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file:
        _load_authorities(context, ca_file)
    else:
        context.load_default_certs()
    if cert_file or key_file:
        _load_pair(context, cert_file, key_file or cert_file)
    return context


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    if not certificate:
        raise UsageError(f"the key {key} has no certificate beside it, expected the file of one, too")
    _check_readable("certificate", certificate)
    _check_readable("key", key)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except UsageError:
        raise
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"the certificate {certificate} and the key {key} cannot be used: {reason_of(error)}; expected two PEM "
            "files that belong together"
        ) from error


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    _check_readable("certificates of authorities", file)
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"the file {file} has no certificate of an authority: {reason_of(error)}") from error


def _check_readable(what: str, file: str) -> None:
    """OpenSSL's own error does not name the file."""
    try:
        with open(file, "rb"):
            return
    except OSError as error:
        raise UsageError(f"the file {file} ({what}) cannot be read: {error.strerror}") from error


def _refuse_password(key: str) -> NoReturn:
    raise UsageError(
        f"the key {key} is encrypted; expected one without a password, in a file that only its owner reads"
    )


def reason_of(error: Exception) -> str:
    """Returns OpenSSL's reason in words: "key values mismatch"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else "no PEM"
    return str(error)


# -- renewal ----------------------------------------------------------------------------------------------------


class Renewed:
    """The context of a server, made anew when its files have changed. `look` is called every RENEW_MS."""

    def __init__(self, files: ServerFiles) -> None:
        """Raises UsageError."""
        self._files = files
        self._seen = self._look_at_files()
        self.context = server_context(files)

    async def find_context(self) -> ssl.SSLContext:
        """Returns the present context, for what waits for one that is being made elsewhere."""
        return self.context

    def look(self) -> bool:
        """Makes a new context if the files have changed; keeps the old one, and says so once, if they cannot be used.
        Returns whether there is a new one.
        """
        found = self._look_at_files()
        if found == self._seen:
            return False
        self._seen = found  # looked at before they are read: what changes meanwhile is seen the next time
        try:
            self.context = server_context(self._files)
        except UsageError as error:
            logger.warning("the certificate stays as it was: %s", error)
            return False
        logger.info("the certificate %s was renewed; new connections get it", self._files.certificate)
        return True

    def _look_at_files(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_identity(file) for file in self._files[:3])


def _identity(file: str) -> tuple[int, int, int] | None:
    """What differs when a file was written or replaced; None where there is none."""
    if not file:
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


# -- names ------------------------------------------------------------------------------------------------------


def name_in(certificate: object) -> str:
    """Returns the common name of the subject of a peer's certificate, as `getpeercert` describes it; else ""."""
    if not isinstance(certificate, dict):
        return ""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return ""
