"""Which systems there are. A driver is imported when it is asked for: it may need a library that is not installed."""

import importlib
from collections.abc import Sequence

from benchmarks.peers.system import NotRun, System

MODULES = {
    "postdate": "postdate",
    "postdate-java": "postdate_java",
    "rocketmq": "rocketmq",
    "rocketmq-100ms": "rocketmq",
    "redis": "redis",
    "beanstalkd": "beanstalkd",
    "nats": "nats",
    "postgresql": "postgresql",
    "rabbitmq": "rabbitmq",
    "celery": "celery",
}
SLUGS: Sequence[str] = tuple(MODULES)
OURS = ("postdate", "postdate-java")


def found(slug: str) -> type[System]:
    """Raises NotRun where its driver, or what that imports, is missing."""
    name = f"benchmarks.peers.systems.{MODULES[slug]}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise NotRun(f"{error}") from error
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, System)]
    return next(kind for kind in kinds if getattr(kind, "slug", None) == slug)
