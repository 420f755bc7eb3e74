"""Unwraps a program's own lines from the container runtime's log format. Pure; never raises.

Docker's json-file driver writes ``{"log":"text","stream":"stdout","time":"..."}``, a long line in pieces of 16 KB of
which only the last one's text ends in a newline. Kubernetes' CRI writes ``<time> stdout F text``, P in place of F for a
piece that is not the last; the prefix of a CRI line is left to ``line_prefixes``.
"""

from __future__ import annotations

import re

import msgspec

from eagle_eye.agent.training_logs.line_search import LINE_BYTES_MAX

_DOCKER = b'{"log":"'
_STREAMS = ("stdout", "stderr")
_CRI = re.compile(rb"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9:]{5}) (stdout|stderr) ([FP]) ")
_CRI_PIECES = (b" stdout P ", b" stderr P ")


class _Entry(msgspec.Struct):
    log: str
    stream: str
    time: str  # unused, but keeps a program's own JSON line from being taken for an entry


_decoder = msgspec.json.Decoder(_Entry)


class ContainerLines:
    """Unwraps the lines of one log, in a runtime's format or not; pieces of a line wait for its last one.

    The first LINE_BYTES_MAX of a line in pieces are kept: no more of any line is read.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, bytes] = {}  # by stream

    def unwrapped(self, lines: bytes) -> bytes:
        """Return the program's own complete lines from complete lines of the log."""
        if _DOCKER in lines:
            return b"".join(self._docker(line) for line in lines.splitlines(keepends=True))
        if self._pieces or any(mark in lines for mark in _CRI_PIECES):
            return b"".join(self._cri(line) for line in lines.splitlines(keepends=True))
        return lines

    def _docker(self, line: bytes) -> bytes:
        if not line.startswith(_DOCKER):
            return line
        try:
            entry = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError):  # invalid characters; unbalanced brackets
            return line
        if entry.stream not in _STREAMS:
            return line
        text = self._pieces.pop(entry.stream, b"") + entry.log.encode("utf-8", "replace").replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        self._keep(entry.stream, text[end:])
        return text[:end]

    def _cri(self, line: bytes) -> bytes:
        found = _CRI.match(line)
        if found is None:
            return line
        stream = found[1].decode()
        begun = self._pieces.pop(stream, b"")
        text = begun + line[found.end() :] if begun else line
        if found[2] == b"F":
            return text
        self._keep(stream, text.rstrip(b"\n"))
        return b""

    def _keep(self, stream: str, piece: bytes) -> None:
        if piece:
            self._pieces[stream] = piece[:LINE_BYTES_MAX]
