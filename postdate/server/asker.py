"""Who has sent a request, for handlers that alone know what it is about."""

from collections.abc import Callable
from typing import NamedTuple

from postdate.access.rules import Action, User, decide
from postdate.errors import NoPermission
from postdate.wire.rights import CLUSTER, Asked, ask_group, ask_topic

FindUser = Callable[[str], User | None]


class Asker(NamedTuple):
    """Who sent a request, and from where. `user` is None for anybody: where a broker has no users, or the request is
    open.

    What an asker may do is decided by the rules at this moment, also when the request came earlier: a pull may wait.
    """

    user: User | None = None
    address: str = ""
    cluster: str = ""
    find_user: FindUser = lambda _: None
    is_internal: bool = False  # one of the broker's own processes

    @property
    def name(self) -> str:
        return "" if self.user is None else self.user.name

    def may(self, asked: Asked) -> bool:
        if self.user is None:
            return True
        user = self.user if self.is_internal else self.find_user(self.user.name)
        if user is None or user.secret != self.user.secret:  # removed, or removed and made anew
            return False
        if asked.is_internal:
            return self.is_internal
        resource = asked.resource
        if resource.kind is CLUSTER:
            resource = resource._replace(name=self.cluster)
        return decide(user, resource, asked.actions, self.address)

    def may_topic(self, name: str, *actions: Action) -> bool:
        return self.may(ask_topic(name, *actions))

    def may_group(self, name: str, *actions: Action) -> bool:
        return self.may(ask_group(name, *actions))

    def require(self, asked: Asked) -> None:
        """Raises NoPermission."""
        if not self.may(asked):
            raise NoPermission(self.explain(asked))

    def explain(self, asked: Asked) -> str:
        """Says why something is not allowed."""
        if asked.is_internal:
            return "only the broker's own bulk and pipeline may ask this, signed with its token and on its broker port"
        resource = asked.resource._replace(name=asked.resource.name[:255] or self.cluster)
        actions = " or ".join(action.value for action in asked.actions)
        return f"user {self.name!r} has no right {actions} to {resource} from {self.address}"


ANYBODY = Asker()
