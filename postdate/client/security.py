"""Who a client is to a broker, and whether others can read what they say: credentials and TLS.

A `Login` is what somebody has given: names, a secret, files. It is found in the arguments of a call, else in the
environment, else in a file of the user's; credentials and TLS each come from the first of these that has any of them. A
`Security` is what is made of it, and goes to everything that opens connections. Without either, a client speaks as it
always has.

The standard library is all this module needs: it travels to Spark's executors.
"""

import os
import ssl
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from postdate.errors import ProtocolError, UsageError
from postdate.tls import client_context
from postdate.wire.signature import Credentials, sign

CREDENTIALS_VARIABLE = "POSTDATE_CREDENTIALS"
CREDENTIALS_FILE_DEFAULT = "postdate/credentials.toml"  # in XDG_CONFIG_HOME, which is ~/.config by default
_VARIABLE_OF = {
    "access_key": "POSTDATE_ACCESS_KEY", "secret_key": "POSTDATE_SECRET_KEY",
    "security_token": "POSTDATE_SECURITY_TOKEN", "tls": "POSTDATE_TLS", "ca_file": "POSTDATE_CA_FILE",
    "cert_file": "POSTDATE_CERT_FILE", "key_file": "POSTDATE_KEY_FILE",
}  # fmt: skip
_SECRET_FILE_VARIABLE = "POSTDATE_SECRET_KEY_FILE"
_SWITCHES = {
    "true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False,
    "permissive": True, "enforcing": True,  # the words of a broker's setting, where one environment serves both
}  # fmt: skip
_WHO = ("access_key", "secret_key", "security_token")
_HOW = ("tls", "ca_file", "cert_file", "key_file")


class Security(NamedTuple):
    """The credentials that sign every request of a client, and the context of its TLS; None stands for without."""

    credentials: Credentials | None = None
    tls: ssl.SSLContext | None = None


NO_SECURITY = Security()


class Login(NamedTuple):
    """Who a client is and how it speaks, as somebody has given it. Other processes may get a copy of it."""

    credentials: Credentials | None = None
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def open(self) -> Security:
        """Reads the files. Raises UsageError."""
        if not self.tls:
            return Security(self.credentials)
        context = client_context(ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file)
        return Security(self.credentials, context)


def signed_fields(fields: Mapping[str, Any], body: bytes, credentials: Credentials | None) -> dict[str, Any]:
    """Returns the fields of a request as they leave: signed, where there are credentials. Raises ProtocolError."""
    if credentials is None:
        return dict(fields)
    try:
        return sign(fields, body, credentials)
    except TypeError as error:
        raise ProtocolError(f"a request that cannot be signed: {error}") from error


# -- where it comes from ----------------------------------------------------------------------------------------


def find_login(
    environ: Mapping[str, str] = os.environ, *, access_key: str | None = None, secret_key: str | None = None,
    security_token: str | None = None, tls: bool | None = None, ca_file: str | None = None,
    cert_file: str | None = None, key_file: str | None = None,
) -> Login:  # fmt: skip
    """Finds who a client is: in the arguments, else in the environment, else in the file of credentials. Files of TLS
    imply TLS. Raises UsageError for half of what is needed, and for a file that others can read.
    """
    given: dict[str, Any] = {
        "access_key": access_key, "secret_key": secret_key, "security_token": security_token, "tls": tls,
        "ca_file": ca_file, "cert_file": cert_file, "key_file": key_file,
    }  # fmt: skip
    sources = [({name: value for name, value in given.items() if value is not None}, "the arguments")]
    sources.append((_from_environment(environ), "the environment"))
    if not all(any(name in values for values, _ in sources for name in names) for names in (_WHO, _HOW)):
        sources.append(_from_file(environ))
    who, who_source = next((each for each in sources if any(name in each[0] for name in _WHO)), ({}, ""))
    how, how_source = next((each for each in sources if any(name in each[0] for name in _HOW)), ({}, ""))
    return Login(_credentials(who, who_source), *_tls(how, how_source))


def without_login(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for processes of the broker's own: they are not who has started the broker, and speak no
    TLS with it.
    """
    private = {*_VARIABLE_OF.values(), _SECRET_FILE_VARIABLE, CREDENTIALS_VARIABLE}
    return {name: value for name, value in environ.items() if name not in private} | {_VARIABLE_OF["tls"]: "0"}


def _credentials(values: Mapping[str, Any], source: str) -> Credentials | None:
    if not values:
        return None
    for name in _WHO[:2]:
        if not values.get(name):
            other = next(each for each in _WHO if each in values)
            raise UsageError(f"{source} has {other} and no {name}, expected both: a user's name and its secret")
    return Credentials(values["access_key"], values["secret_key"], values.get("security_token", ""))


def _tls(values: Mapping[str, Any], source: str) -> tuple[bool, str, str, str]:
    files = [str(values.get(name, "")) for name in _HOW[1:]]
    if files[2] and not files[1]:
        raise UsageError(f"{source} has key_file and no cert_file, expected the certificate, too")
    return bool(values.get("tls", any(files))), *files  # type: ignore[return-value]  # there are three of them


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: environ[key] for name, key in _VARIABLE_OF.items() if environ.get(key)}
    if "tls" in found:
        text = found["tls"].strip().lower()
        if text not in _SWITCHES:
            raise UsageError(f"environment POSTDATE_TLS is {text[:64]!r}, expected 1 or 0")
        found["tls"] = _SWITCHES[text]
    file = environ.get(_SECRET_FILE_VARIABLE)
    if file and "secret_key" not in found:
        found["secret_key"] = _read_private(Path(file)).strip()
    return found


def _from_file(environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    named = environ.get(CREDENTIALS_VARIABLE)
    path = Path(named) if named else _default_file(environ)
    if path is None or not (named or path.is_file()):
        return {}, ""
    try:
        values = tomllib.loads(_read_private(path))
    except tomllib.TOMLDecodeError as error:  # its text may show what stands there
        raise UsageError(f"the file {path} is not TOML, expected lines such as access_key = 'alice'") from error
    for name, value in values.items():
        expected = bool if name == "tls" else str
        if name not in _VARIABLE_OF:
            raise UsageError(f"the file {path} has {name!r}, expected one of {', '.join(_VARIABLE_OF)}")
        if type(value) is not expected:
            raise UsageError(f"{name} in {path} is no {'true or false' if expected is bool else 'text'}")
    return {name: value for name, value in values.items() if value != ""}, f"the file {path}"


def _default_file(environ: Mapping[str, str]) -> Path | None:
    folder = environ.get("XDG_CONFIG_HOME")
    if folder:
        return Path(folder, CREDENTIALS_FILE_DEFAULT)
    try:
        return Path.home() / ".config" / CREDENTIALS_FILE_DEFAULT
    except RuntimeError:  # a user without a home
        return None


def _read_private(path: Path) -> str:
    """Reads a file with a secret. Raises UsageError where others can read it, too."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & 0o077:
                raise UsageError(f"the file {path} holds a secret and others can read it: run chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise UsageError(f"the file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the file {path} is no text in UTF-8") from error
