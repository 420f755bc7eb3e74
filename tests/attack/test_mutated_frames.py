"""Frames and rows changed at random: no 5xx, the server goes on, valid frames beside them are all kept."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import CONTENT_TYPE, Rank, block, encode_frame, encode_request
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import is_name
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS
from eagle_eye.schema.rows import encode_row, encode_rows_request, encode_template, template_id, template_of
from tests.server.builders import frame
from tests.server.own_process import OwnProcess, serving

SEED = 20_261_123
REQUESTS = 1_500
VALID_EVERY = 10
NO_RATE = "[limits]\nbad_requests_per_s = 1e9\nbad_burst = 1000000000\n"  # faster than any client may
BAD: tuple[Any, ...] = (
    "", "a\nb", "a\x00b", "x" * 254, "\u202ename", -1, -(1 << 62), 1 << 62, 0, 1e308, float("nan"), float("-inf"),
    None, [], {}, True, b"\xff\xfe", "y" * 20_000,
)  # fmt: skip


def sent(node: str, sequence: int, now_s: float) -> Any:
    return frame(
        sequence,
        node,
        now_s,
        ranks=[Rank("job", 0, 2, 0, role="stage-0"), Rank("job", 1, 2, 1, silent_s=1.0)],
        blocks=[
            block(Scope.DEVICE, {0: {"gpu_power_watts": 100.0, "train_step": 7.0}}),
            block(Scope.LINK, {"mlx5_0": {"link_up": 1.0}}),
        ],
        events=[Event(now_s, "phase", 0, {"name": "train", "job": "job"}), Event(now_s, "xid", 0, {"code": 79})],
        collectors={"gpu": "ok"},
    )


def mutated(dice: random.Random, plain: Any) -> Any:
    """Return the value with one part of it, anywhere, put in place of another or taken away."""
    if isinstance(plain, dict) and plain and dice.random() < 0.9:
        key = dice.choice(list(plain))
        if dice.random() < 0.1:
            return {dice.choice([*map(str, BAD[:5])]) if name == key else name: value for name, value in plain.items()}
        return {**plain, key: mutated(dice, plain[key])}
    if isinstance(plain, list) and plain and dice.random() < 0.9:
        at = dice.randrange(len(plain))
        return [*plain[:at], mutated(dice, plain[at]), *plain[at + 1 :]]
    return dice.choice(BAD)


def cut(dice: random.Random, raw: bytes) -> bytes:
    """Return the bytes with some changed, some left out, or the end missing."""
    changed = bytearray(raw)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed[: dice.randrange(1, len(changed) + 1)]) if dice.random() < 0.3 else bytes(changed)


def whole(dice: random.Random, node: str, sequence: int, now_s: float) -> bytes:
    raw = encode_frame(sent(node, sequence, now_s))
    for _ in range(dice.randrange(1, 3)):
        raw = msgspec.msgpack.encode(mutated(dice, msgspec.msgpack.decode(raw)))
    return encode_request([cut(dice, raw) if dice.random() < 0.2 else raw], now_s)


def rows(dice: random.Random, node: str, sequence: int, now_s: float) -> bytes:
    one = sent(node, sequence, now_s)
    template = template_of(one)
    raw = msgspec.msgpack.encode(mutated(dice, msgspec.msgpack.decode(encode_template(template))))
    request = encode_rows_request([raw], [encode_row(one, template, template_id(raw))], now_s)
    return cut(dice, request) if dice.random() < 0.3 else request


def names_in(reported: Any, fields: frozenset[str]) -> list[str]:
    """Return the texts of these fields, however deep."""
    if isinstance(reported, list):
        return [name for one in reported for name in names_in(one, fields)]
    if not isinstance(reported, dict):
        return []
    mine = [value for key, value in reported.items() if key in fields and isinstance(value, str)]
    return mine + [name for value in reported.values() for name in names_in(value, fields)]


def post(server: OwnProcess, content: bytes, kind: str) -> int:
    return server.client.post("/api/v1/frames", content=content, headers={"content-type": kind}).status_code


def test_mutated_frames_and_rows_break_nothing_and_no_bad_name_is_shown(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    config = tmp_path / "server.toml"
    config.write_text(NO_RATE)
    with serving(tmp_path / "data", "--config", str(config)) as server:
        valid = 0
        statuses: dict[int, int] = {}
        for number in range(1, REQUESTS + 1):
            now_s = time.time()
            by_rows = dice.random() < 0.5
            content = (rows if by_rows else whole)(dice, f"bad-{number % 7}", number, now_s)
            status = post(server, content, ROWS if by_rows else CONTENT_TYPE)
            statuses[status] = statuses.get(status, 0) + 1
            if number % VALID_EVERY == 0:
                valid += 1
                good = encode_request([encode_frame(sent("good", valid, now_s))], now_s)
                assert post(server, good, CONTENT_TYPE) == 200
        assert not [status for status in statuses if status >= 500 and status != 503], statuses
        assert {200, 400} <= statuses.keys()
        assert server.process.poll() is None
        assert server.client.get("/healthz").status_code == 200
        watermark = post_watermark(server, valid + 1)
        assert watermark == valid + 1
        fields = frozenset({"node", "job", "role", "link", "boot_id", "version"})
        for path in ("/api/v1/nodes?limit=1000", "/api/v1/jobs?limit=1000", "/api/v1/incidents?limit=1000"):
            names = names_in(server.client.get(path).json(), fields)
            assert [name for name in names if name and not is_name(name)] == []
        assert "Traceback" not in server.said()


def post_watermark(server: OwnProcess, sequence: int) -> int:
    """Send one more valid frame and return up to which sequence all are here."""
    now_s = time.time()
    content = encode_request([encode_frame(sent("good", sequence, now_s))], now_s)
    answer = server.client.post("/api/v1/frames", content=content, headers={"content-type": CONTENT_TYPE})
    found: int = answer.json()["watermark"]
    return found
