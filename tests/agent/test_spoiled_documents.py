"""Whatever stands in a message's fields: it is refused for a reason, or what comes of it can be sent on."""

from __future__ import annotations

import json

import msgspec

from eagle_eye.agent.collectors.training import RankProcess
from eagle_eye.agent.training_hook.message import BadMessage, decode, encode
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import WIRE_VERSION, BadFrame, Frame, Rank, block, encode_frame, read_frame, unknown_keys
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import message
from tests.agent.spoiled import spoiled

FRAME = Frame(
    version=WIRE_VERSION,
    node="n1",
    boot_id="b",
    stream="s",
    sequence=1,
    time_s=1.7e9,
    interval_s=1.0,
    agent_version="0.1.0",
    job="j",
    ranks=[Rank("j", 0, 8, 0)],
    blocks=[block(Scope.DEVICE, {0: {"train_loss": 2.0}}), block(Scope.LINK, {"mlx5_0/1": {"link_up": 1.0}})],
    events=[Event(1.7e9, "xid", 0, {"code": 79})],
    collectors={"nvml": "ok"},
    dropped={"spool_full": 1},
)
TAIL = {
    "job": "j",
    "role": "stage",
    "phase": "train",
    "gpu": "GPU-1",
    "events": [
        [1, 1.7e9, "phase", "eval"],
        [2, 1.7e9, "checkpoint_end", 5],
        [3, 1.7e9, "training_error", "ValueError: no such expert"],
    ],
}
strict = msgspec.msgpack.Encoder()  # as the wire's, without its mending of texts


def test_what_the_agent_believes_of_a_hook_fits_into_a_frame() -> None:
    believed = 0
    for tail in spoiled(TAIL):
        try:
            seen = decode(encode(message(), json.dumps(tail).encode()))
        except BadMessage:
            continue
        process = RankProcess(seen, 1, 0, 0.0)
        events = process.accept(seen, 1.0, 1.7e9)
        rows = [block(Scope.DEVICE, {0: process.row(1.0)})]
        read_frame(strict.encode(msgspec.structs.replace(FRAME, events=events, ranks=[process.rank(1.0)], blocks=rows)))
        believed += 1
    assert believed > 20


def test_what_the_server_believes_of_a_frame_can_be_sent_on() -> None:
    believed = 0
    for plain in spoiled(msgspec.msgpack.decode(encode_frame(FRAME))):
        try:
            raw = strict.encode(plain)
        except (UnicodeEncodeError, OverflowError):  # no MessagePack
            continue
        try:
            seen = read_frame(raw).frame
        except BadFrame:
            continue
        again, unknown = read_frame(strict.encode(seen))
        assert (strict.encode(again), unknown) == (strict.encode(seen), ())
        assert unknown_keys(raw) == ()
        believed += 1
    assert believed > 100
