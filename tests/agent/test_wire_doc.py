from __future__ import annotations

import json
import re

import msgspec
import pytest

from eagle_eye.schema import frame as wire
from eagle_eye.schema import metrics, rows
from eagle_eye.schema.events import EVENTS, Event
from eagle_eye.schema.names import NAME_CHARS_MAX
from tests.agent.fakes import REPOSITORY

TEXT = (REPOSITORY / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_decodes_to_what_the_page_says() -> None:
    body = bytes.fromhex(fenced("hex"))
    sent_s, (raw,) = wire.decode_request(body)
    frame = wire.decode_frame(raw)
    assert sent_s == 1_700_000_000.25
    assert (frame.node, frame.sequence, frame.job) == ("n17", 42, "llm")
    assert list(wire.values_of(frame.blocks[0])) == [1200.0]
    plain = msgspec.msgpack.decode(body)
    for block in plain["frames"][0]["blocks"]:
        block["values"] = block["values"].hex()
    assert plain == json.loads(fenced("json"))


def test_the_example_of_a_row_decodes_to_what_the_page_says() -> None:
    request = rows.decode_rows_request(bytes.fromhex(fenced("hex-rows")))
    (raw,), (row,) = request.templates, request.rows
    template, unknown = rows.decode_template(raw)
    assert (request.sent_s, unknown, rows.template_of_row(row)) == (1_700_000_000.25, (), rows.template_id(raw))
    frame = rows.read_row(template, row).frame
    whole = wire.decode_frame(wire.decode_request(bytes.fromhex(fenced("hex")))[1][0])
    assert (frame.blocks[0].metrics, list(wire.values_of(frame.blocks[0]))) == (
        ["train_step", "gpu_power_watts"],
        [1200.0, 412.5],
    )
    assert msgspec.structs.replace(frame, blocks=[]) == msgspec.structs.replace(whole, blocks=[], events=[])


def test_the_page_has_every_key_of_a_frame_and_its_parts() -> None:
    for shape in (
        wire.Envelope,
        wire.Frame,
        wire.Block,
        wire.Rank,
        Event,
        rows.RowTemplate,
        rows.TemplateBlock,
        rows.Tail,
    ):
        for name in shape.__struct_fields__:
            assert f"`{name}`" in TEXT, f"{shape.__name__}.{name}"


def test_the_page_has_every_event_with_its_attributes() -> None:
    for spec in EVENTS:
        attributes = ", ".join(f"`{name}`" for name in spec.attributes)
        assert f"| `{spec.kind}` | {attributes} |" in TEXT, spec.kind


@pytest.mark.parametrize(
    "value",
    [
        wire.CONTENT_TYPE,
        rows.CONTENT_TYPE,
        f"{rows.TEMPLATES_PER_REQUEST_MAX} templates",
        f"{wire.REQUEST_BYTES_MAX >> 20} MiB, {wire.FRAMES_PER_REQUEST_MAX:,} frames",
        f"{wire.FRAME_BYTES_MAX >> 20} MiB, {wire.BLOCKS_MAX} blocks, {wire.EVENTS_MAX:,} events",
        f"{wire.EVENTS_MAX:,} events, {wire.RANKS_MAX:,} ranks",
        f"{wire.KEYS_MAX:,} rows",
        f"1 to {NAME_CHARS_MAX} printable characters",
        f"{wire.TEXT_CHARS_MAX:,} characters",
    ],
)
def test_the_page_has_the_limits_that_the_code_enforces(value: str) -> None:
    assert value in TEXT


def test_the_page_has_every_reason_of_a_bad_frame() -> None:
    source = (REPOSITORY / "schema/eagle_eye/schema/frame.py").read_text(encoding="utf-8")
    reasons = set(re.findall(r'BadFrame\(\s*"(\w+)"', source))
    assert len(reasons) >= 8
    for reason in reasons:
        assert f"`{reason}`" in TEXT, reason


def test_the_page_has_every_metric_with_its_scope_kind_and_unit_and_no_other() -> None:
    table = TEXT.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    said = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)
    known = [(spec.name, spec.scope.value, spec.kind.value, spec.unit) for spec in metrics.BY_NAME.values()]
    assert said == known
