"""What the last words of a program say of its end, as one table for the agent, the detectors and the launcher. Pure.

The words are a Python traceback, whole or its innermost frame, or a message without one, such as what the C++ runtime
prints before it aborts. Sources: CUDA Runtime API, error types; HIP; the texts of torch's store, Gloo, NCCL, ibverbs.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

HEADER = "Traceback (most recent call last):"

# What ended the program: its own device, a connection that it could not make, a peer that had ended before it or did
# not come, or something else of its own; "" without words.
Cause = Literal["device", "unreached", "echo", "own", ""]


class DeviceWord(NamedTuple):
    """A class of errors that only a GPU, its links or its driver cause, whatever the program."""

    name: str
    said: str
    pattern: re.Pattern[str]


def _device(name: str, said: str, pattern: str) -> DeviceWord:
    return DeviceWord(name, said, re.compile(pattern, re.IGNORECASE))


DEVICE_WORDS = (
    _device(
        "memory",
        "its GPU's memory has an uncorrectable error",
        r"uncorrectable ECC|ECC_?Uncorrectable|ECC_?NotCorrectable|double[- ]bit ECC",
    ),
    _device("nvlink", "NVLink has an uncorrectable error", r"uncorrectable NVLink|NVLINK_?Uncorrectable"),
    _device(
        "contained",
        "its GPU contained a hardware error",
        r"cudaErrorContained|CUDA_ERROR_CONTAINED|error containment|peer GPU memory over nvlink or a hardware error",
    ),
    _device(
        "unavailable",
        "its GPU is busy or unavailable",
        r"device\(?s?\)? (?:is|are|is/are) busy or unavailable|Error_?Devices?_?Unavailable",
    ),
    _device("not_ready", "its GPUs' fabric is not ready", r"system not yet initialized|Error_?System_?Not_?Ready"),
    _device("lost", "its GPU is lost", r"GPU_? ?is_? ?lost|fallen off the bus|NVML_ERROR_GPU_IS_LOST"),
    _device("reset", "its GPU needs a reset", r"(?:GPU|device) (?:requires|needs)(?: a)? reset|RESET_REQUIRED"),
    _device("hang", "its GPU hangs", r"HW Exception by GPU node"),
)

# A connection that could not be made; one that was lost is an echo.
CANNOT_CONNECT = re.compile(
    r"connectFullMesh|no route to host|network is (?:unreachable|down)|host is (?:unreachable|down)"
    r"|\bconnect(?:ion|ing|ed)?\b[^\n]{0,200}(?:timed? ?out|refused|unreachable|invalid argument|cannot assign)"
    r"|socket\w*connect[^\n]{0,200}(?:timed? ?out|refused|failed)|tim(?:ed?|ing) ?out[^\n]{0,60}\bconnect"
    r"|failed to connect|ibv_modify_qp[^\n]{0,80}(?:timed? ?out|failed)",
    re.IGNORECASE,
)
# What survivors of a peer's death say.
ECHO = re.compile(
    r"connection (closed|reset|refused)|clos(?:ed|ing)[^\n]{0,40}peer|broken pipe|remote process exited|remote error"
    r"|socket (closed|timeout)|(nccl|gloo|store|peer).{0,80}(time[d ]?out|abort|unhandled|remote|closed)"
    r"|unhandled (system|cuda) error|watchdog caught collective|DistNetworkError|DistStoreError"
    r"|peer.{0,40}(gone|lost|unreachable)",
    re.IGNORECASE | re.DOTALL,
)
# What those say that waited in vain for a peer, whichever it was.
WAITED = re.compile(r"waiting for clients|wait timeout|barrier", re.IGNORECASE)

# What a peer, a device, the network or a signal does to a correct program, by the exception's type...
KINDS_OF_OTHERS = re.compile(
    r"Dist\w*Error|Connection|Timeout|Network|Socket|HTTP|SSL|Broken|Remote|Interrupt|Signal|SystemExit|EOFError"
    r"|ChildFailed|OutOfMemory|MemoryError|Accelerator|Cuda|CUDA|NCCL|Blocking"
)
# ...what storage does...
KINDS_OF_STORAGE = re.compile(r"OSError|IOError|FileNotFound|Permission")
# ...and the same by its message.
WORDS_OF_OTHERS = re.compile(
    r"nccl|rccl|gloo|\bmpi\b|\bucx\b|watchdog|cuda|cudnn|cublas|\bhip\b|\bgpu|device|\becc\b|socket|connect|peer"
    r"|timed? ?out|network|rendezvous|allocat|memory|input/output|\bstale\b|\bspace\b|\bstore\b|storage|zip archive"
    r"|killed|signal|worker .{0,40}exited|corrupt|checksum|address already in use",
    re.IGNORECASE,
)

_CHAINED = re.compile(r"^(?:During handling of|The above exception was).*:$", re.MULTILINE)
_FRAME = re.compile(r'\s{0,8}File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?\s*\Z')
# CUDA's and torch's advice to the reader below a message: it says nothing of the cause.
_ADVICE = re.compile(
    r"\s*(?:(?:CUDA|HIP) kernel errors might|For debugging consider|Compile with `|Search for `cuda|Device-side assert)"
)


class Parts(NamedTuple):
    """A traceback's innermost frame, its source line, and what follows the frames: everything if there are none."""

    place: re.Match[str] | None  # with the groups file, line, function
    source: str
    ending: str


def parts(traceback: str) -> Parts:
    """Return the parts of one traceback, whole or its innermost frame alone; what it was chained to is left out."""
    place, source = None, ""
    lines = traceback.splitlines()
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line):
            place, source = frame, lines[number + 1] if number + 1 < len(lines) else ""
        elif place is not None and line and not line[0].isspace():
            return Parts(place, source, _CHAINED.split("\n".join(lines[number:]), maxsplit=1)[0].strip())
    return Parts(place, source, "" if place is not None else traceback.strip())


def is_advice(line: str) -> bool:
    """Whether the line is advice to the reader below a message."""
    return _ADVICE.match(line) is not None


def chained(text: str) -> bool:
    """Whether one exception was raised while another was handled."""
    return _CHAINED.search(text) is not None


def last_words(text: str) -> str:
    """Return the end of a traceback after its last frame: the exception and its message, of one line or several."""
    return parts(text.rpartition(HEADER)[2]).ending


def device_word(text: str) -> DeviceWord | None:
    """Return the class of a device's error that the text names, None for none."""
    return next((word for word in DEVICE_WORDS if word.pattern.search(text)), None)


def cause(text: str) -> Cause:
    """Return what ended the program by its words. Source lines and frames do not count; a device's error wins."""
    words = "\n".join(line for line in text.splitlines() if not line[:1].isspace())
    if device_word(words) is not None:
        return "device"
    if CANNOT_CONNECT.search(words):
        return "unreached"
    return "echo" if ECHO.search(words) else "own" if text.strip() else ""


def headline(text: str) -> str:
    """Return the one line of the words that says the cause: a device's error, else the last, "" without any."""
    lines = [line.strip() for line in last_words(text).splitlines() if line.strip() and not _ADVICE.match(line)]
    return next((line for line in lines if device_word(line)), lines[-1] if lines else "")
