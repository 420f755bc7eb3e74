"""What the client does where its extra is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.builders import body, frame, running

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("pandas", "numpy", "pyarrow")))  # None: an import of it fails
from eagle_eye.client import Client, ClientError, MissingExtra
client = Client(sys.argv[1])
print(len(client.nodes()), len(client.jobs()), len(client.incidents()), len(client.actions()))
print(next(client.events(after=0)).kind)
for ask in (lambda: client.query_range("gpu_power_watts"), lambda: client.samples("job", "-1h")):
    try:
        ask()
    except MissingExtra as error:
        print(error, isinstance(error, ClientError), isinstance(error, ImportError))
print(sorted({"pandas.core", "numpy.ma", "pyarrow.lib", "fastapi", "httpx", "rich"} & sys.modules.keys()))
"""


def test_without_its_extra_the_client_has_everything_but_frames(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame()))
        command = [sys.executable, "-W", "error", "-c", PROGRAM, server.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    missing = 'data frames need: pip install "eagle-eye[client]" (no module numpy) True True'
    assert done.stdout.splitlines() == ["1 1 0 0", "node", missing, missing, "[]"]


def test_pandas_is_imported_when_a_frame_is_asked_for() -> None:
    program = "import eagle_eye.client, sys; print({'pandas', 'numpy', 'pyarrow'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
