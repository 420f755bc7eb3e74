"""What people are told beside a server's answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle_eye.cli.operator import connect


class Standby(BaseHTTPRequestHandler):
    """Answers from the records, as a standby does whose leader is away."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Eagle-Eye-Standby", "http://a:8470 leads and cannot be reached (ConnectError)")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def standby() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Standby) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_that_a_standby_answers_from_the_records_is_said_once(standby: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = connect(standby, None)
    assert [client.call("GET", "/api/v1/incidents") for _ in range(2)] == [{}, {}]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"{standby} stands by, and answers from the records, without what agents send now:"
        " http://a:8470 leads and cannot be reached (ConnectError)\n"
    )
