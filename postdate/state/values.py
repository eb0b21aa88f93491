"""Key-value settings that operators keep here, as on RocketMQ's name server: a small table of the fold.

A value belongs to (namespace, key). Nothing in the broker reads one.
"""

Row = list[str]  # namespace, key, value


class Values:
    """Texts by namespace and key."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, str]] = {}
        self._count = 0  # of all namespaces

    def __len__(self) -> int:
        return self._count

    def find(self, namespace: str, key: str) -> str | None:
        return self._by_namespace.get(namespace, {}).get(key)

    def of(self, namespace: str) -> dict[str, str]:
        """Returns the values of a namespace by key."""
        return dict(self._by_namespace.get(namespace, {}))

    def put(self, namespace: str, key: str, value: str) -> None:
        values = self._by_namespace.setdefault(namespace, {})
        self._count += key not in values
        values[key] = value

    def delete(self, namespace: str, key: str) -> None:
        """Forgets a value, and with its last value the namespace."""
        values = self._by_namespace.get(namespace, {})
        if key not in values:
            return
        del values[key]
        self._count -= 1
        if not values:
            del self._by_namespace[namespace]

    def state(self) -> list[Row]:
        return [
            [namespace, key, value] for namespace, values in self._by_namespace.items() for key, value in values.items()
        ]

    def load(self, rows: list[Row]) -> None:
        self._by_namespace, self._count = {}, 0
        for namespace, key, value in rows:
            self.put(namespace, key, value)
