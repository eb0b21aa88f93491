"""The users of RocketMQ 4.x."""

from pathlib import Path

import pytest

from postdate.access.plain_acl import read_plain_acl
from postdate.access.rules import Action, Resource, ResourceKind, decide
from postdate.errors import UsageError

# As RocketMQ 4.9 ships it, with an account more.
PLAIN_ACL = """
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*

accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC=SUB
    groupPerms:
      # the group should convert to retry topic
      - groupA=DENY
      - groupB=PUB|SUB
      - groupC=SUB

  - accessKey: rocketmq2
    secretKey: "12345678"
    whiteRemoteAddress: 192.168.1.*
    # if it is admin, it could access all resources
    admin: true

  - accessKey: wide
    secretKey: 12345678
    defaultTopicPerm: PUB | SUB
    topicPerms:
      - secret=DENY
"""


def test_accounts_become_users_with_the_rights_that_they_had(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(PLAIN_ACL)
    found = read_plain_acl(path)
    users = {user.name: user for user in found.users}
    assert [(user.name, user.secret, user.is_super) for user in found.users] == [
        ("RocketMQ", "12345678", False), ("rocketmq2", "12345678", True), ("wide", "12345678", False),
    ]  # fmt: skip

    def may(name: str, kind: ResourceKind, resource: str, action: Action) -> bool:
        return decide(users[name], Resource(kind, resource), (action,), "10.10.103.7")

    topic, group = ResourceKind.TOPIC, ResourceKind.GROUP
    for resource, pub, sub in (
        ("topicA", False, False),
        ("topicB", True, True),
        ("topicC", False, True),
        ("other", False, False),
    ):
        assert may("RocketMQ", topic, resource, Action.PUB) is pub
        assert may("RocketMQ", topic, resource, Action.SUB) is sub
    for resource, sub in (("groupA", False), ("groupB", True), ("groupC", True), ("other", True)):
        assert may("RocketMQ", group, resource, Action.SUB) is sub
    assert may("wide", topic, "any", Action.PUB)
    assert not may("wide", topic, "secret", Action.PUB)
    assert not may("wide", group, "any", Action.SUB)
    assert not may("wide", topic, "any", Action.DELETE)
    assert found.warnings == [
        "globalWhiteRemoteAddresses are not taken over: everybody has to sign in",
        "whiteRemoteAddress of rocketmq2 is not taken over: everybody has to sign in",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no list of accounts"), ("accounts: 7", "has no list of accounts"), ("accounts: [7]", "has no list"),
        ("a: [", "is not YAML"), ("accounts:\n - accessKey: a b", "can be no user's name"),
        ("accounts:\n - accessKey: a\n   secretKey: hush", "account a: a secret has"),
        ("accounts:\n - accessKey: a\n   secretKey: hush-hush\n   topicPerms: [x]", "expected NAME=PERMISSION"),
        ("accounts:\n - accessKey: a\n   secretKey: hush-hush\n   topicPerms: [x=FLY]", "permission 'FLY'"),
        ("accounts:\n - {accessKey: a, secretKey: hush-hush}\n - {accessKey: a, secretKey: hush-hush}", "twice"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"), ("\x00", "is not YAML"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_taken_over_is_refused_without_its_secrets(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        read_plain_acl(path)
    assert "hush" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plain_acl\.yml cannot be read: No such file"):
        read_plain_acl(tmp_path / "plain_acl.yml")
