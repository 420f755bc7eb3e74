"""What schemathesis needs to know of Eagle Eye's requests beyond their schemas; it loads this module by name.

Subscriptions lead to loopback, whatever was generated. Requests that are to be accepted get what no schema can say: a
body in a form of its own, values that agree with each other, and no cursor, which only an earlier answer could tell.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import strategies as st

from eagle_eye.schema.frame import CONTENT_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_TYPE
from eagle_eye.server.ingest.remote_write import endpoint
from tests.server.builders import NOW, body, frame
from tests.server.remote_write.requests import series, snappy, v1, v2
from tests.server.test_rows_ingest import request as rows

NOWHERE = "http://127.0.0.1:9/"
TICKETS = "id,node,opened\nt-7,n1,2026-01-31T12:00:00Z\n"
SEQUENCES = st.integers(1, 1 << 40)
SAMPLE = st.builds(lambda value: series("DCGM_FI_DEV_GPU_TEMP", value, NOW, gpu="0", Hostname="n9"), st.floats(0, 90))
# Pairs of times of which the first is before the second, whichever an endpoint has.
IN_ORDER = (("since", "until"), ("start", "end"))

schemathesis.openapi.media_type(CONTENT_TYPE, SEQUENCES.map(lambda sequence: body(frame(sequence))))
schemathesis.openapi.media_type(ROWS_TYPE, SEQUENCES.map(lambda sequence: rows(frame(sequence))))
schemathesis.openapi.media_type(f"{endpoint.MEDIA_TYPE};proto={endpoint.V1}", SAMPLE.map(lambda one: snappy(v1(one))))
schemathesis.openapi.media_type(f"{endpoint.MEDIA_TYPE};proto={endpoint.V2}", SAMPLE.map(lambda one: snappy(v2(one))))


def before_call(_context: Any, case: schemathesis.Case[Any], **_more: Any) -> None:
    """Keep the request from leaving the machine, and one that is to be accepted from what its schema cannot say."""
    if isinstance(case.body, dict) and isinstance(case.body.get("url"), str):
        case.body["url"] = NOWHERE
    if case.meta is not None and case.meta.generation.mode.is_positive:
        agree_in_query(case.query or {}, {parameter.name for parameter in case.operation.query})
        if case.operation.path == "/api/v1/frames":
            case.headers.pop("Content-Encoding", None)  # these bodies are as they are
        if isinstance(case.body, dict):
            agree_in_body(case.body)


schemathesis.hook(before_call)


def agree_in_query(query: dict[str, Any], known: set[str]) -> None:
    query.pop("cursor", None)
    for first, second in IN_ORDER:
        if {first, second} <= known and (first in query or second in query):
            query[first], query[second] = str(NOW - 600), str(NOW)
    if "metric" in query:
        query.pop("statistic", None)  # counters have no mean
        query["step"] = max(1.0, float(query.get("step", 1.0)))  # 600 of them are no more than the most


def agree_in_body(said: dict[str, Any]) -> None:
    if said.get("format", "cloudevents") != "cloudevents" or "secret" not in said:
        said.pop("types", None)  # alerts are of fewer types, and what is changed may be one that takes alerts
    if said.get("format") in ("csv", "jsonl"):
        said.update(format="csv", text=TICKETS)
    if said.get("state") != "accepted":
        said.pop("claim", None)  # only who accepts an action claims it
    if "exits" in said:
        said["exits"] = [{"rank": rank["rank"], "exit_code": -9} for rank in said.get("ranks", [])]
    if "held_up_by" in said:
        said["held_up_by"] = [rank["rank"] for rank in said.get("ranks", [])]
