"""Redis: a sorted set by due time, a hash of bodies, and a script that takes what is due."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.system import CANCELLED, UNKNOWN, Received, body
from benchmarks.peers.systems.inbox import POLL_S, Inbox, now_ms, pause_s
from benchmarks.peers.systems.served import Served
from benchmarks.peers.systems.server import HOST, Server, free_port, library_version, program, said_version

BATCH_COUNT = 500
WAITING, BODIES, NEXT_ID = "waiting", "bodies", "next-id"

# The bodies of the first that are due; where none is, the due time of the next, or nothing.
TAKE = """
local ids = redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[2])
if #ids == 0 then
  return redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
end
local bodies = redis.call('HMGET', KEYS[2], unpack(ids))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #ids - 1)
redis.call('HDEL', KEYS[2], unpack(ids))
return bodies
"""


class Redis(Served[Any]):
    name = "Redis, sorted set"
    slug = "redis"
    settings = (
        f"Sends in transactions of {BATCH_COUNT}, two commands each; a Lua script takes up to {BATCH_COUNT} due ones "
        f"and removes them (a consumer that dies then has lost them), cancels by ZREM, {BATCH_COUNT} at once; where "
        f"none is due, the consumer asks again at the next due time, after {POLL_S * 1e3:.0f} ms at the latest; "
        "append-only file, no snapshots."
    )
    durable = "synced before the answer (appendfsync always)"
    volatile = "written, synced every second (appendfsync everysec)"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {
            "redis-server": said_version([_program(), "--version"]),
            "redis-py": library_version("redis"),
            "hiredis": library_version("hiredis"),
        }

    def start(self) -> None:
        import redis

        self.stop()
        self._server, port = serve_redis(self.folder, self.is_durable)
        self._client = redis.Redis(HOST, port)
        self._take = self._client.register_script(TAKE)

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        first_id = self._connected.incrby(NEXT_ID, len(dues_ms)) - len(dues_ms)
        handles: list[bytes | str] = [str(first_id + number) for number in range(len(dues_ms))]
        for place in range(0, len(dues_ms), BATCH_COUNT):
            ids, dues = handles[place : place + BATCH_COUNT], dues_ms[place : place + BATCH_COUNT]
            bodies = [body(first_index + place + number) for number in range(len(ids))]
            with self._connected.pipeline(transaction=True) as sending:
                sending.execute_command("HSET", BODIES, *_pairs(ids, bodies))
                sending.execute_command("ZADD", WAITING, *_pairs(dues, ids))
                sending.execute()
        return handles

    def receive(self, count: int, limit_s: float) -> Received:
        inbox = Inbox(count, limit_s)
        while inbox.is_open:
            found = self._take([WAITING, BODIES], [int(now_ms()), min(BATCH_COUNT, inbox.missing)])
            if isinstance(found, list):
                inbox.take(found)
            else:
                time.sleep(pause_s(None if found is None else float(found)))
        return inbox.received

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        answers: list[str] = []
        for place in range(0, len(handles), BATCH_COUNT):
            ids = handles[place : place + BATCH_COUNT]
            with self._connected.pipeline(transaction=True) as sending:
                for each in ids:
                    sending.zrem(WAITING, each)
                sending.hdel(BODIES, *ids)
                answers += [CANCELLED if removed else UNKNOWN for removed in sending.execute()[:-1]]
        return answers


def serve_redis(folder: Path, is_durable: bool) -> tuple[Server, int]:
    """A server that answers, and its port."""
    import redis

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command: list[str | Path] = [
        _program(), "--bind", HOST, "--port", str(port), "--dir", folder, "--save", "", "--appendonly", "yes",
        "--appendfsync", "always" if is_durable else "everysec",
    ]  # fmt: skip
    server = Server(command, folder)
    with redis.Redis(HOST, port) as asking:
        # Busy while it reads what an earlier life left.
        server.await_answer(asking.ping, (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError))
    return server, port


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> Iterator[Any]:
    for pair in zip(first, second, strict=True):
        yield from pair


def _program() -> Path:
    return program("redis-server", "Debian's redis-server")


SYSTEM = Redis
