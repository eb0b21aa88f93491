"""Users and rules: the first user closes the broker, and everything after that is signed, as conf/tools.yml says."""

import sys
from pathlib import Path

from operating import CLUSTER, Look, Operator, Wrong, find_broker, ok

ADMIN, SECRET = "admin", "secret-of-admin"
REFUSED = r"CODE: 16  DESC: "


def story(operator: Operator) -> None:
    broker = find_broker(operator)
    operator.expects(
        "the first user", ["createUser", "-b", broker, "-u", ADMIN, "-p", SECRET, "-t", "Super"], "success"
    )
    operator.expects("who does not sign is refused", ["listUser", "-b", broker], f"{REFUSED}the request is not signed")
    sign_as(ADMIN, "not-the-secret")
    operator.expects("a wrong secret too", ["listUser", "-b", broker], f"{REFUSED}the request is not signed")
    sign_as(ADMIN, SECRET)
    manage_users(operator, broker)
    manage_rules(operator, broker)
    refuse(operator, broker)


def manage_users(operator: Operator, broker: str) -> None:
    expects = operator.expects
    expects("a user", ["createUser", "-c", CLUSTER, "-u", "alice", "-p", "secret-of-alice"], "success")
    said = expects("all users, without passwords", ["listUser", "-b", broker], r"^admin .*Super", r"^alice .*Normal")
    if SECRET in said or "secret-of-alice" in said:
        raise Wrong(f"listUser shows a password:\n{said}")
    ok("listUser: no passwords")
    expects("only some", ["listUser", "-b", broker, "-f", "ali"], r"^alice ")
    expects("a user is disabled", ["updateUser", "-b", broker, "-u", "alice", "-s", "disable"], "success")
    expects("one user", ["getUser", "-c", CLUSTER, "-u", "alice"], r"^alice .*Normal +disable")
    expects("and enabled", ["updateUser", "-b", broker, "-u", "alice", "-s", "enable"], "success")
    expects("a copy keeps the password", ["copyUser", "-f", broker, "-t", broker, "-u", "alice"], "copy user of alice")
    expects("another user", ["createUser", "-b", broker, "-u", "bob", "-p", "secret-of-bob"], "success")
    expects("is deleted", ["deleteUser", "-c", CLUSTER, "-u", "bob"], "success")
    expects("the last super user stays", ["deleteUser", "-b", broker, "-u", ADMIN], "one super user must stay")


def manage_rules(operator: Operator, broker: str) -> None:
    expects, alice = operator.expects, "User:alice"
    rules = ["-r", "Topic:orders,Group:workers", "-a", "Pub,Sub", "-i", "127.0.0.0/8", "-d", "Allow"]
    expects("rules", ["createAcl", "-b", broker, "-s", alice, *rules], "success")
    expects("the rules of a user", ["getAcl", "-b", broker, "-s", alice], r"Topic:orders.*Pub.*127\.0\.0\.0/8.*Allow")
    expects("all rules", ["listAcl", "-c", CLUSTER], r"^User:alice .*Group:workers")
    denied = ["-r", "Group:workers", "-a", "Get", "-d", "Deny"]
    expects("a rule is changed", ["updateAcl", "-b", broker, "-s", alice, *denied], "success")
    expects("as asked for", ["getAcl", "-b", broker, "-s", alice], r"Group:workers.*Get.*Deny")
    expects("rules are copied", ["copyAcl", "-f", broker, "-t", broker, "-s", alice], "copy acl of User:alice")
    expects("a rule is deleted", ["deleteAcl", "-b", broker, "-s", alice, "-r", "Group:workers"], "success")
    if "Group:workers" in operator.types("getAcl", "-b", broker, "-s", alice):
        raise Wrong("deleteAcl has left the rule")
    unknown = ["-r", "Queue:a", "-a", "Pub", "-d", "Allow"]
    expects("what is no resource", ["createAcl", "-b", broker, "-s", alice, *unknown], "expected Topic:NAME")


def refuse(operator: Operator, broker: str) -> None:
    operator.expects("an admin makes a topic", ["updateTopic", "-b", broker, "-t", "orders"], "success")
    sign_as("alice", "secret-of-alice")
    operator.looks([
        Look("a user without the right is refused", ("updateTopic", "-b", broker, "-t", "mine"),
             (rf"{REFUSED}user 'alice' has no right Create to Topic:mine",)),
        Look("and for users", ("createUser", "-b", broker, "-u", "carol", "-p", "secret-of-carol"),
             (rf"{REFUSED}user 'alice' has no right Update to Cluster:{CLUSTER}",)),
        Look("and what it may see is shown", ("topicList",), (r"",)),
    ])  # fmt: skip


def sign_as(name: str, secret: str) -> None:
    """Writes the file that mqadmin signs by."""
    path = Path("conf/tools.yml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"accessKey: {name}\nsecretKey: {secret}\n")


def main() -> int:
    try:
        story(Operator(sys.argv[1], sys.argv[2:]))
    except Wrong as error:
        print(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
