"""Dispatch: every request of the table finds the method that answers it, and no other code is answered."""

from pathlib import Path

from postdate.server.requests.pull import Pulls
from postdate.server.requests.send import Sends
from postdate.wire import codes
from postdate.wire.requests import REQUESTS, ClientRequest, Request
from tests.support.peer import connected
from tests.support.server import serving

OWN_PATHS = {"send.collect": Sends.collect, "pull.pull": Pulls.pull}  # neither is called by the table


def test_every_request_finds_the_method_that_its_row_names(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        methods = served.dispatcher._methods
        for request in Request:
            owner, _, name = request.handler.partition(".")
            if request.handler in OWN_PATHS:
                assert request.code not in methods
                assert OWN_PATHS[request.handler].__module__ == f"postdate.server.requests.{owner}"
            else:
                assert methods[request.code].__name__ == name, request.name
        assert methods.keys() <= REQUESTS.keys()


def test_the_handler_of_a_request_names_the_file_that_answers_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for code, method in served.dispatcher._methods.items():
            owner = REQUESTS[code].handler.partition(".")[0]
            folder = "sessions" if owner == "table" else "requests"
            assert method.__module__ == f"postdate.server.{folder}.{owner}", REQUESTS[code].name


def test_requests_to_clients_and_unknown_codes_are_not_answered_but_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for code in (*ClientRequest, 1, 99_999):
            answer = peer.ask(code)
            assert (answer.code, answer.remark) == (
                codes.REQUEST_CODE_NOT_SUPPORTED,
                f"request code {int(code)} is not supported",
            )
