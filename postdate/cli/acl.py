"""`postdate acl`: what users may do."""

import argparse
from pathlib import Path

from postdate.access.users import make_rule
from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import count, print_table
from postdate.client import users as requests

HELP = """\
Makes, lists and deletes the rules of users. What no rule allows is denied; the most exact resource counts.

examples:
  postdate acl create billing --resource Topic:orders --resource Group:billing --actions Sub
  postdate acl create shop --resource 'Topic:shop-*' --actions Pub,Get --source 10.0.0.0/8
  postdate acl create shop --resource Topic:shop-secret --actions All --deny
  postdate acl list billing
  postdate acl delete billing --resource Topic:orders --yes
  postdate acl import plain_acl.yml              the accounts of RocketMQ 4.x

resources: Topic:NAME, Group:NAME, Cluster:NAME, where NAME may end with * or be one, or * for everything
actions: All, Pub, Sub, Create, Update, Delete, Get, List

exit codes: 0 done, 1 nothing was deleted, 2 wrong usage, or a file that cannot be read, 3 no broker was reached or it
refused, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "user", HELP)
    for name, summary in (("create", "give a user rules"), ("update", "replace rules of a user")):
        verb = verbs.add(name, _put, summary)
        verb.add_argument(
            "--resource", metavar="R", action="append", required=True, help="what it is for; again for more"
        )
        verb.add_argument("--actions", metavar="A,B", required=True, help="what may be done, or not")
        verb.add_argument(
            "--source", metavar="CIDR", action="append", default=[], help="only from there; again for more"
        )
        verb.add_argument("--deny", action="store_true", help="deny instead of allow")
        verb.add_argument("--default", action="store_true", help="counts only where no other rule fits")
    listing = verbs.add("list", _list, "the rules of a user, or of all", named=False)
    listing.add_argument("name", metavar="NAME", nargs="?", default="", help="the user (default: all)")
    verbs.add_delete(_delete, "take rules from a user").add_argument(
        "--resource", metavar="R", default="", help="those for this resource (default: all)"
    )
    importing = verbs.add("import", _import, "take over users and rules of RocketMQ 4.x", named=False)
    importing.add_argument("file", metavar="FILE", type=Path, help="plain_acl.yml")


def _put(arguments: argparse.Namespace) -> int:
    decision, policy = "Deny" if arguments.deny else "Allow", "Default" if arguments.default else "Custom"
    actions = arguments.actions.split(",")
    rules = [make_rule(each, actions, arguments.source, decision, policy) for each in arguments.resource]
    requests.put_rules(arguments.addr, arguments.name, rules)
    if arguments.json:
        print_json({"user": arguments.name, "resources": [rule.pattern for rule in rules]})
    else:
        print(
            f"user {arguments.name} has {count(len(rules), 'rule')} more: {', '.join(rule.pattern for rule in rules)}"
        )
    return OK


def _list(arguments: argparse.Namespace) -> int:
    found = requests.list_rules(arguments.addr, arguments.name)
    if arguments.json:
        print_json([rule._asdict() for rule in found])
    elif found:
        rows = [
            [rule.user, rule.resource, rule.decision, " ".join(rule.actions), " ".join(rule.sources), rule.policy]
            for rule in found
        ]
        print_table(["user", "resource", "decision", "actions", "from", "policy"], rows)
    else:
        print("there is no rule")
    return OK


def _delete(arguments: argparse.Namespace) -> int:
    what = f"the rules for {arguments.resource}" if arguments.resource else "all rules"
    if not (arguments.yes or is_meant(f"Take {what} from user {arguments.name}?")):
        return say_no("nothing was deleted")
    requests.delete_rules(arguments.addr, arguments.name, arguments.resource)
    if arguments.json:
        print_json({"user": arguments.name, "resource": arguments.resource or None})
    else:
        print(f"took {what} from user {arguments.name}")
    return OK


def _import(arguments: argparse.Namespace) -> int:
    from postdate.access.plain_acl import read_plain_acl  # YAML takes a while to load

    found = read_plain_acl(arguments.file)
    for user in sorted(found.users, key=lambda user: not user.is_super):  # a broker's first user is a super user
        requests.create_user(arguments.addr, user.name, user.secret, is_super=user.is_super)
        if user.rules:
            requests.put_rules(arguments.addr, user.name, user.rules)
    names = [user.name for user in found.users]
    if arguments.json:
        print_json({"users": names, "warnings": found.warnings})
        return OK
    for warning in found.warnings:
        say_no(warning)
    print(f"took over {count(len(names), 'user')}: {', '.join(names)}")
    return OK
