"""What the server knows of every connection, whatever its client speaks."""

from pathlib import Path

from postdate.server.peer import Peer
from tests.support.grpc_client import calling, serving_grpc
from tests.support.peer import connected
from tests.support.server import Served


def test_a_connection_that_is_not_made_yet_is_not_open_and_holds_nothing() -> None:
    peer = Peer()
    assert (peer.is_open, peer.is_tls, peer.buffered_bytes) == (False, False, 0)
    peer.close()
    peer.abort()


def test_connections_of_both_protocols_are_known_alike(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as old, calling(served) as new:
        old.round_trip()
        new.round_trip()
        found = served.call(lambda: [(str(peer).partition(":")[0], peer.is_open) for peer in peers(served)])
        assert found == [("127.0.0.1", True)] * 2
        for peer in served.call(lambda: peers(served)):
            served.call(peer.abort)
        old.expect_closed()


def peers(served: Served) -> list[Peer]:
    return list(served.dispatcher.connections)
