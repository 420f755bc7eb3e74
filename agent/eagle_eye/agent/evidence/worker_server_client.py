"""Queries a training process through PyTorch's worker server socket; works even if its main thread hangs.

A program opens it by ``torch.distributed.elastic.control_plane.worker_main`` at the path in TORCH_WORKER_SERVER_SOCKET.
"""

from __future__ import annotations

import http.client
import os
import socket
import stat
import struct

from eagle_eye.agent.evidence.proc_files import environment, open_inside
from eagle_eye.agent.evidence.source import Scene
from eagle_eye.agent.evidence.suspects import Suspect
from eagle_eye.agent.files.foreign import NotTheirs

VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
ANSWER_S_MAX = 2.0  # it answers in a tenth of a second; a stopped process never does

_CREDENTIALS = struct.Struct("=iII")


class NoWorkerServer(Exception):
    """The process was started without a worker server socket."""


def ask(scene: Scene, suspect: Suspect, handler: str, bytes_max: int) -> bytes:
    """Return the answer of the process to ``handler``. Raises NoWorkerServer, OSError, http.client.HTTPException.

    Nothing is sent if another process listens on the socket at the path.
    """
    path = environment(scene.proc, suspect.pid)[0].get(VARIABLE, "")
    if not path:
        raise NoWorkerServer(f"it was started without {VARIABLE}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.01, min(ANSWER_S_MAX, scene.left_s())))
        named = open_inside(scene.proc, suspect.pid, path)
        try:
            if not stat.S_ISSOCK(os.fstat(named).st_mode):
                raise NotTheirs(f"{path[:80]!r} is no socket")
            connection.connect(f"/proc/self/fd/{named}")
        finally:
            os.close(named)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        owner = _CREDENTIALS.unpack(raw)[0]
        if owner != suspect.pid:
            raise NotTheirs(f"{path[:80]!r} is answered by process {owner}, not by {suspect.pid}")
        return _post(connection, handler, bytes_max)


def _post(connection: socket.socket, handler: str, bytes_max: int) -> bytes:
    client = http.client.HTTPConnection("localhost")
    client.sock = connection
    client.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
    answer = client.getresponse()
    content = answer.read(bytes_max + 1)
    if answer.status != 200 or len(content) > bytes_max:
        raise http.client.HTTPException(f"{handler} answered {answer.status} with {len(content)} bytes or more")
    return content
