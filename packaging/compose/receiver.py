"""The demo's webhook receiver: prints each event once. A real one does something about it (docs/reference/webhooks.md).

python receiver.py SECRET-FILE
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from standardwebhooks import Webhook, WebhookVerificationError

PORT = 9000
BODY_BYTES_MAX = 1 << 20
SEEN_MAX = 10_000


class Receiver(BaseHTTPRequestHandler):
    """Verifies, answers, prints."""

    timeout = 10.0
    webhook: Webhook
    seen: dict[str, None]

    def do_GET(self) -> None:
        """Say that it is alive."""
        self._answer(204)

    def do_POST(self) -> None:
        """Take an event: 400 for one that is not signed, 204 for all others, also when it comes a second time."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= BODY_BYTES_MAX:
            self._answer(413)
            return
        body = self.rfile.read(length)
        try:
            self.webhook.verify(body, dict(self.headers))
        except WebhookVerificationError:
            self._answer(400)
            return
        event = json.loads(body)
        if event["id"] not in self.seen:
            self.seen[event["id"]] = None
            if len(self.seen) > SEEN_MAX:
                self.seen.pop(next(iter(self.seen)))
            data = event["data"]
            said = data.get("summary") or data.get("node") or data.get("state") or ""
            print(event["type"].removeprefix("eagle_eye."), data.get("job", ""), said, flush=True)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        """Say nothing of single requests."""

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()


def main(secret_file: Path) -> None:
    """Listen until ended; the secret is waited for."""
    while not secret_file.exists():
        time.sleep(0.5)
    Receiver.webhook = Webhook(secret_file.read_text(encoding="utf-8").strip())
    Receiver.seen = {}
    ThreadingHTTPServer(("0.0.0.0", PORT), Receiver).serve_forever()  # noqa: S104 - of a network of containers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
