"""A client made of the wire's page alone: its tables say what is sent, where, of which type and in which order."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, running

PAGE = (Path(__file__).parents[2] / "docs/reference/wire.md").read_text(encoding="utf-8")
TYPES = {"int": int, "float": float, "float 64": float, "str": str, "bin": bytes}
PACKED = {"uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q", "float64": "<d"}
NODE = "n17"


def section(heading: str) -> str:
    return PAGE.partition(f"\n{heading}\n")[2].partition(f"\n{heading.split(' ', 1)[0]} ")[0]


def tables(heading: str) -> list[list[list[str]]]:
    """Return the section's tables: rows of cells, without their heads."""
    found = re.findall(r"(?:^\|.*\n)+", section(heading), flags=re.MULTILINE)
    return [
        [[cell.strip().strip("`") for cell in row.split("|")[1:-1]] for row in one.splitlines()[2:]] for one in found
    ]


def request_of(heading: str) -> tuple[str, str, dict[str, str], str]:
    """Return method, path, headers and body of the section's first HTTP example."""
    head, _, content = re.findall(r"```http\n(.*?)```", section(heading), flags=re.DOTALL)[0].partition("\n\n")
    line, *headers = head.strip().splitlines()
    method, path, _ = line.split(" ")
    return method, path, dict(one.split(": ", 1) for one in headers), content


def needed(heading: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the map that a table of keys asks for: every key that is not optional, of the type that it says."""
    found = {}
    for key, kind, meaning in tables(heading)[0]:
        if key not in values:
            assert meaning.startswith("optional"), f"{key} of {heading} is needed, and a client does not know of it"
            continue
        assert isinstance(values[key], TYPES.get(kind, dict if kind.startswith("map") else list)), (key, kind)
        found[key] = values[key]
    return found


def blocks() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return one block for each scope with every metric of the page, and the value of each."""
    rows = tables("## Metrics")[0]
    values = {metric: 1000.0 + at for at, (metric, *_) in enumerate(rows)}
    keys: dict[str, list[Any]] = {"device": [0], "node": [-1], "link": ["mlx5_0"]}
    made = []
    for scope, mine in keys.items():
        metrics = [metric for metric, its_scope, *_ in rows if its_scope == scope]
        numbers = b"".join(struct.pack("<d", values[metric]) for metric in metrics)
        made.append(needed("### Blocks", {"scope": scope, "keys": mine, "metrics": metrics, "values": numbers}))
    return made, values


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as started:
        yield started


@pytest.fixture(scope="module")
def token(server: Running) -> str:
    """Enrol as the page says, with a join token that a person made."""
    text, record = mint("join", None, NOW, 3600.0)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    method, path, headers, content = request_of("## Enrolment")
    asked = {**json.loads(content), "node": NODE}
    headers["Authorization"] = headers["Authorization"].replace("<join token>", text)
    answer = server.client.request(method, path, headers=headers, content=json.dumps(asked))
    assert answer.status_code == 201
    told = re.search(r"`(\{\"id\".*?\})`", section("## Enrolment"))
    assert told is not None
    assert answer.json().keys() == json.loads(told[1]).keys()
    found: str = answer.json()["token"]
    return found


def test_a_second_enrolment_is_refused_as_the_page_says(server: Running, token: str) -> None:
    text, record = mint("join", None, NOW, 3600.0)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    method, path, headers, _ = request_of("## Enrolment")
    headers["Authorization"] = f"Bearer {text}"
    answer = server.client.request(method, path, headers=headers, content=json.dumps({"node": NODE}))
    listed = {
        (int(row[0]), reason)
        for row in tables("## Enrolment")[0]
        if row[0].isdigit()
        for reason in row[1].split("`, `")
    }
    assert (answer.status_code, answer.json()["reason"]) in listed
    assert answer.json()["reason"] == "enrolled"
    assert token


def sent(server: Running, token: str, headers: dict[str, str], content: bytes) -> dict[str, Any]:
    method, path, *_ = request_of("## The request")
    headers = {**headers, "Authorization": f"Bearer {token}"}
    answer = server.client.request(method, path, headers=headers, content=content)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stored(server: Running, metric: str) -> list[float]:
    query: dict[str, Any] = {"metric": metric, "node": NODE, "start": NOW - 30, "end": NOW + 30}
    series = server.client.get("/api/v1/query_range", params=query, headers=reader(server)).json()["series"]
    return [value for one in series for _, value in one["points"]]


def reader(server: Running) -> dict[str, str]:
    text, record = mint("read", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    return {"Authorization": f"Bearer {text}"}


def test_a_whole_frame_with_every_metric_of_the_page_is_taken_and_read_back(server: Running, token: str) -> None:
    made, values = blocks()
    frame = needed(
        "## The frame",
        {
            "version": 1,
            "node": NODE,
            "boot_id": "boot-1",
            "stream": "stream-1",
            "sequence": 1,
            "time_s": NOW,
            "interval_s": 1.0,
            "agent_version": "mine 0.1",
            "blocks": made,
        },
    )
    envelope = needed("## The request", {"version": 1, "sent_s": NOW, "frames": [frame]})
    _, _, headers, _ = request_of("## The request")
    answer = sent(server, token, {"Content-Type": headers["Content-Type"]}, msgspec.msgpack.encode(envelope))
    assert (answer["accepted"], answer["watermark"]) == (1, 1)
    assert "unknown" not in answer  # the server knows each name of the page
    for metric in ("gpu_power_watts", "train_step", "node_memory_used_ratio", "link_up"):
        assert stored(server, metric)[0] == values[metric]


def test_a_row_that_is_laid_out_as_the_tables_say_is_taken_and_read_back(server: Running, token: str) -> None:
    block = {"scope": "device", "keys": [0, 1], "metrics": ["train_step", "gpu_power_watts"], "exact": 1}
    shared = {"node": NODE, "boot_id": "boot-1", "stream": "stream-2", "interval_s": 1.0, "agent_version": "mine 0.1"}
    template = msgspec.msgpack.encode({"version": 2, **shared, "blocks": [block]})
    numbers = struct.pack("<2d", 7.0, 8.0) + struct.pack("<2f", 400.0, 410.0)
    head_table, row_table = tables("## Rows")[:2]
    row = laid_out(row_table, [2, b"\0\0\0", 0, hashlib.sha256(template).digest()[:16], 1, NOW + 5]) + numbers
    head = laid_out(head_table, [b"EER2", 1, 1, NOW + 5])
    content = head + b"".join(struct.pack("<I", len(part)) + part for part in (template, row))
    _, _, headers, _ = request_of("## Rows")
    answer = sent(server, token, {"Content-Type": headers["Content-Type"]}, content)
    assert (answer["accepted"], answer["watermark"]) == (1, 1)
    assert {7.0, 8.0} <= set(stored(server, "train_step"))
    assert {400.0, 410.0} <= set(stored(server, "gpu_power_watts"))


def laid_out(table: list[list[str]], values: list[Any]) -> bytes:
    """Return the bytes of a fixed layout: each value at its place, in the type that the table says."""
    found = b""
    for (place, kind, *_), value in zip(table, values, strict=False):
        first, _, last = place.partition("-")
        assert int(first) == len(found), place
        found += value if isinstance(value, bytes) else struct.pack(PACKED[kind], value)
        assert not last or int(last) == len(found) - 1, place
    return found
