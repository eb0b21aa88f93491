"""`postdate user`: who may sign in to a broker."""

import argparse
import os
import secrets
import socket
from pathlib import Path

from postdate.access.rules import User
from postdate.access.users import NORMAL, SUPER, Users, check_name, check_secret, with_user
from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import print_facts, print_table
from postdate.client import users as requests
from postdate.errors import UsageError
from postdate.tls import CERTIFICATE_FILE

HELP = """\
Makes, changes and lists users. A broker that has users lets nobody else in.

examples:
  postdate user init --data ./postdate-data --credentials admin.toml    the first user, before or beside the broker
  postdate user init --data ./postdate-data --self-signed broker.internal    and a certificate for TLS
  postdate user create billing                    prints a random secret, once
  postdate user create billing --secret-file -    takes the secret from standard input
  postdate user update billing --new-secret
  postdate user update billing --disable
  postdate user delete billing --yes
  postdate acl create billing --resource Topic:orders --actions Sub

exit codes: 0 done, 1 there is no such user, or nothing was deleted, 2 wrong usage, or a file that cannot be used, 3 no
broker was reached or it refused, 130 interrupted
"""

_SECRET_BYTES = 24
_OWNER_ONLY = 0o600


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "user", HELP)
    _add_init(verbs)
    create = verbs.add("create", _create, "make a user")
    create.add_argument("--super", action="store_true", help="one who may do everything")
    _add_secret(create, "the secret (default: a random one, which is printed)")
    update = verbs.add("update", _update, "change a user")
    _add_secret(update, "the new secret")
    update.add_argument("--new-secret", action="store_true", help="a new random secret, which is printed")
    kind = update.add_mutually_exclusive_group()
    kind.add_argument("--super", action="store_true", help="may do everything")
    kind.add_argument("--normal", action="store_true", help="may do what its rules allow")
    status = update.add_mutually_exclusive_group()
    status.add_argument("--enable", action="store_true", help="may sign in again")
    status.add_argument("--disable", action="store_true", help="may not sign in")
    verbs.add("list", _list, "all users", named=False)
    verbs.add("show", _show, "a user and its rules")
    verbs.add_delete(_delete, "remove a user and its rules")


def _add_init(verbs: Verbs) -> None:
    init = verbs.add_local("init", _init, "make the first user of a data folder, a super user")
    init.add_argument("--data", metavar="DIR", type=Path, default=Path("postdate-data"), help="the data folder")
    init.add_argument("--name", default="admin", help="its name (default: admin)")
    init.add_argument(
        "--credentials", metavar="FILE", type=Path,
        help="write name and secret to a new file that only you can read: POSTDATE_CREDENTIALS names it to a client",
    )  # fmt: skip
    init.add_argument(
        "--self-signed",
        metavar="HOST",
        nargs="*",
        help="also make a certificate for TLS, for these names and addresses of the broker (default: this machine's)",
    )


def _add_secret(verb: argparse.ArgumentParser, summary: str) -> None:
    verb.add_argument("--secret-file", metavar="FILE", help=f"{summary}, in a file; - reads standard input")


def _init(arguments: argparse.Namespace) -> int:
    data: Path = arguments.data
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    user = User(arguments.name, secret, is_super=True)
    add_user = with_user(user)  # refuses a name that cannot be one before anything is written
    if arguments.credentials is not None and arguments.credentials.exists():
        raise UsageError(f"the file {arguments.credentials} exists: name a new one")
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    users = Users(data)
    if user.name in users.all:
        return _add_certificate(arguments)
    certificate = _make_certificate(arguments.self_signed, data) if arguments.self_signed is not None else None
    if arguments.credentials is not None:
        _write_credentials(arguments.credentials, user.name, secret, certificate)
    users.change(add_user)
    if arguments.json:
        print_json({
            "name": user.name, "secret": None if arguments.credentials else secret,
            "credentials": str(arguments.credentials or "") or None, "certificate": str(certificate or "") or None,
        })  # fmt: skip
        return OK
    print(f"made super user {user.name} in {data}")
    if arguments.credentials is None:
        print(f"its secret, which is not shown again: {secret}")
    else:
        print(f"its secret is in {arguments.credentials}: export POSTDATE_CREDENTIALS={arguments.credentials}")
    if certificate is not None:
        print(f"a certificate for TLS is in {certificate}; clients need it as their CA file")
    return OK


def _add_certificate(arguments: argparse.Namespace) -> int:
    """Makes the certificate alone, where the folder has the user and lacks that."""
    lacks_it = not (arguments.data / CERTIFICATE_FILE).exists()
    if arguments.self_signed is None or arguments.credentials is not None or not lacks_it:
        return say_no(
            f"there is a user {arguments.name} already: give it a new secret with user update, or name another"
        )
    certificate = _make_certificate(arguments.self_signed, arguments.data)
    if arguments.json:
        print_json({"name": arguments.name, "secret": None, "credentials": None, "certificate": str(certificate)})
    else:
        print(f"user {arguments.name} stays as it is")
        print(f"a certificate for TLS is in {certificate}; clients need it as their CA file")
    return OK


def _make_certificate(hosts: list[str], data: Path) -> Path:
    from postdate.access.certificates import make_certificate  # the package that makes it takes a while to load

    names = hosts or list(dict.fromkeys(("localhost", socket.gethostname(), "127.0.0.1", "::1")))
    return make_certificate(data, names)


def _write_credentials(path: Path, name: str, secret: str, certificate: Path | None) -> None:
    text = f'access_key = "{name}"\nsecret_key = "{secret}"\n'
    if certificate is not None:
        text += f'ca_file = "{certificate.resolve()}"\n'
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), "w", encoding="utf-8") as file:
        file.write(text)


def _read_secret(name: str) -> str:
    """Reads a secret from a file. Raises UsageError."""
    try:
        secret = Path("/dev/stdin" if name == "-" else name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the secret cannot be read from {name}: {error}") from error
    check_secret(secret)
    return secret


def _create(arguments: argparse.Namespace) -> int:
    check_name(arguments.name)
    secret = _read_secret(arguments.secret_file) if arguments.secret_file else secrets.token_urlsafe(_SECRET_BYTES)
    requests.create_user(arguments.addr, arguments.name, secret, is_super=arguments.super)
    shown = None if arguments.secret_file else secret
    if arguments.json:
        print_json({"name": arguments.name, "type": SUPER if arguments.super else NORMAL, "secret": shown})
        return OK
    print(f"made {'super user' if arguments.super else 'user'} {arguments.name}")
    if shown:
        print(f"its secret, which is not shown again: {shown}")
    if not arguments.super:
        print(f"it may do nothing yet: postdate acl create {arguments.name} --resource Topic:NAME --actions Pub,Sub")
    return OK


def _update(arguments: argparse.Namespace) -> int:
    if arguments.new_secret and arguments.secret_file:
        raise UsageError("give --new-secret or --secret-file, not both")
    shown = secrets.token_urlsafe(_SECRET_BYTES) if arguments.new_secret else ""
    secret = _read_secret(arguments.secret_file) if arguments.secret_file else shown
    kind = SUPER if arguments.super else NORMAL if arguments.normal else ""
    status = "enable" if arguments.enable else "disable" if arguments.disable else ""
    if not (secret or kind or status):
        raise UsageError(
            "nothing to change: give --new-secret, --secret-file, --super, --normal, --enable or --disable"
        )
    requests.update_user(arguments.addr, arguments.name, secret, kind, status)
    if arguments.json:
        print_json({"name": arguments.name, "secret": shown or None})
        return OK
    print(f"changed user {arguments.name}")
    if shown:
        print(f"its secret, which is not shown again: {shown}")
    return OK


def _list(arguments: argparse.Namespace) -> int:
    found = requests.list_users(arguments.addr)
    if arguments.json:
        print_json([user._asdict() for user in found])
    elif found:
        print_table(["user", "type", "status"], [list(user) for user in found])
    else:
        print("there is no user: everybody who reaches the broker may do everything")
    return OK


def _show(arguments: argparse.Namespace) -> int:
    user = requests.find_user(arguments.addr, arguments.name)
    if user is None:
        return say_no(f"there is no user {arguments.name}")
    rules = requests.list_rules(arguments.addr, arguments.name)
    if arguments.json:
        print_json({**user._asdict(), "rules": [rule._asdict() for rule in rules]})
        return OK
    print_facts({"user": user.name, "type": user.kind, "status": user.status})
    if rules:
        print()
        print_table(
            ["resource", "decision", "actions", "from", "policy"],
            [
                [rule.resource, rule.decision, " ".join(rule.actions), " ".join(rule.sources), rule.policy]
                for rule in rules
            ],
        )
    return OK


def _delete(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or is_meant(f"Delete user {arguments.name} and its rules?")):
        return say_no("nothing was deleted")
    requests.delete_user(arguments.addr, arguments.name)
    if arguments.json:
        print_json({"name": arguments.name})
    else:
        print(f"deleted user {arguments.name}")
    return OK
