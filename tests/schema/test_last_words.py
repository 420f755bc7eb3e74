"""One table says what a program's last words mean, to the agent, the detectors and the launcher."""

from __future__ import annotations

import pytest

from eagle_eye.schema.last_words import HEADER, cause, device_word, headline

FRAME = '  File "train.py", line 3, in <module>\n    step()\n'
CUDA = "torch.AcceleratorError: CUDA error: "


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (CUDA + "uncorrectable ECC error encountered", "memory"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", "memory"),
        ("Search for `cudaErrorECCUncorrectable'", "memory"),
        ("hipErrorECCNotCorrectable", "memory"),
        (CUDA + "uncorrectable NVLink error detected during the execution", "nvlink"),
        ("cudaErrorNvlinkUncorrectable", "nvlink"),
        ("CUDA_ERROR_NVLINK_UNCORRECTABLE", "nvlink"),
        (CUDA + "Invalid access of peer GPU memory over nvlink or a hardware error", "contained"),
        ("cudaErrorContained", "contained"),
        (CUDA + "CUDA-capable device(s) is/are busy or unavailable", "unavailable"),
        ("cudaErrorDevicesUnavailable", "unavailable"),
        ("all CUDA-capable devices are busy or unavailable", "unavailable"),
        ("Error 802: system not yet initialized", "not_ready"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "not_ready"),
        ("NVML: GPU is lost", "lost"),
        ("NVML_ERROR_GPU_IS_LOST", "lost"),
        ("the GPU has fallen off the bus", "lost"),
        ("GPU requires reset", "reset"),
        ("NV_ERR_RESET_REQUIRED", "reset"),
        ("HW Exception by GPU node-3 (Agent handle: 0x55) reason :GPU Hang", "hang"),
    ],
)
def test_a_device_error_is_known_by_its_class(words: str, name: str) -> None:
    word = device_word(words)
    assert word is not None
    assert word.name == name
    assert cause(words) == "device"


@pytest.mark.parametrize(
    "words",
    [
        CUDA + "an illegal memory access was encountered",
        CUDA + "device-side assert triggered",
        CUDA + "out of memory",
        CUDA + "unspecified launch failure",
        CUDA + "invalid device ordinal",
        "RuntimeError: No CUDA GPUs are available",
        "KeyError: 'reset'",
    ],
)
def test_what_programs_cause_is_no_device_error(words: str) -> None:
    assert device_word(words) is None
    assert cause(words) == "own"


def test_a_device_error_wins_over_an_echo() -> None:
    text = "NCCL error in: x, unhandled cuda error\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'"
    assert cause(text) == "device"
    assert headline(text).startswith("Cuda failure 214")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("DistBackendError: NCCL error, unhandled cuda error", "echo"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41524", "echo"),
        ("DistNetworkError: failed to connect to 10.0.0.1:29500", "unreached"),
        ("ValueError: bad sample", "own"),
        ("", ""),
    ],
)
def test_a_cause_is_named_by_its_words(words: str, expected: str) -> None:
    assert cause(words) == expected


def test_source_lines_are_no_words() -> None:
    text = (
        'Traceback:\n  File "a.py", line 1, in f\n    raise NoRoute("no route to host, connection closed")\nKeyError: 3'
    )
    assert cause(text) == "own"


def test_the_headline_is_the_messages_last_line_without_advice() -> None:
    text = f"{HEADER}\n{FRAME}DistBackendError: NCCL error\nLast error:\nNET/IB: status=12\nFor debugging consider x"
    assert headline(text) == "NET/IB: status=12"
    assert headline("") == ""
