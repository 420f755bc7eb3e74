"""A webhook subscriber in a process of its own: it checks the signature and writes down what it got before it answers.

    python -m benchmarks.soak.subscriber --port 9000 --secret-file FILE --log FILE

Each line of the log is a JSON object: ``got`` with what came, then ``answered`` once the answer was handed to the
kernel. It may be killed at any moment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from standardwebhooks import Webhook, WebhookVerificationError


class Log:
    """Lines appended whole, from any thread; each outlives the process."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line."""
        os.write(self._file, json.dumps({"time_s": time.time(), **line}).encode() + b"\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def serve(port: int, secret_file: Path, log_file: Path) -> None:
    """Answer until killed. The secret is read when a request needs it: it is made after this process."""
    log = Log(log_file)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60.0

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            id_ = headers.get("webhook-id", "")
            try:
                event = Webhook(secret_file.read_text().strip()).verify(content, headers)
            except (OSError, WebhookVerificationError) as error:
                log.write({"what": "unsigned", "id": id_, "why": str(error) or type(error).__name__})
                self._answer(401, id_)
                return
            log.write({"what": "got", "id": id_, "event": event})
            self._answer(204, id_)

        def _answer(self, status: int, id_: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            self.wfile.flush()
            if status == 204:
                log.write({"what": "answered", "id": id_})

        def log_message(self, *_: object) -> None:
            pass

    with _Server(("127.0.0.1", port), Handler) as server:
        server.serve_forever(poll_interval=0.2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.subscriber", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    serve(args.port, args.secret_file, args.log)
