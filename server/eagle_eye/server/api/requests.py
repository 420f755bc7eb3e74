"""Common dependencies of endpoints: the server's components, authentication, bodies and pagination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import Depends, Query, Request, Response
from msgspec import Struct
from pydantic import AfterValidator

from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.schema.near_names import did_you_mean
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.api.constraints import TIME, Constraint
from eagle_eye.server.api.filter_values import FAULT_NAMES
from eagle_eye.server.api.visibility import SIGHT, JobOwners, Sight, admitted
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import AuditEntry, Scope
from eagle_eye.server.security.auth import Principal, Tokens
from eagle_eye.server.security.limits import Limits
from eagle_eye.server.security.people import People
from eagle_eye.server.store.store import PAGE_LIMIT_MAX, Kind, Page, Store
from eagle_eye.server.transport import raw_http
from eagle_eye.server.transport.path_names import register

BODY_BYTES_MAX = 4 << 20  # a job of 100,000 ranks fits
register()  # {job:name} and {node:name} in the endpoints' paths
_NONE: Mapping[str, Constraint] = MappingProxyType({})
_WHOLE_MAX = 1 << 53  # larger floats do not identify one integer
StructT = TypeVar("StructT")
RecordT = TypeVar("RecordT", bound=Struct)


@dataclass(slots=True)
class OpenStreams:
    """The number of connected readers of a streaming endpoint; counted on the event loop."""

    count: int = 0


class Identifies(Protocol):
    """Components for authentication and rate limits."""

    limits: Limits
    job_owners: JobOwners
    people: People
    store: Store
    tokens: Tokens


class Stores(Protocol):
    """A component with the records."""

    store: Store


class Times(Protocol):
    """A component with the time."""

    clock: Clock


def services(request: Request) -> Any:
    """Return the server's components; each endpoint's ``Needs`` declares which of them it uses."""
    return request.app.state.services


def somebody(request: Request, parts: Annotated[Identifies, Depends(services)]) -> Principal:
    """Return the principal, whatever its scope; the endpoint decides what it may do."""
    principal = parts.people.authenticate(request.method, request.scope["headers"], request.scope["state"])
    parts.limits.check_token(principal)
    return principal


def needs(scope: Scope) -> Callable[..., Principal]:
    """Return a dependency that requires a scope that includes ``scope``, and returns the principal."""

    def check(request: Request, parts: Annotated[Identifies, Depends(services)]) -> Principal:
        principal = somebody(request, parts)
        parts.tokens.authorise(principal, scope)
        if principal.owners_only:
            sight = request.scope["state"][SIGHT] = Sight(principal, parts.job_owners)
            asked = {**request.query_params, **request.path_params}
            operators = parts.people.settings.operate_groups
            unseen = admitted(principal, request.scope["route"].path, asked, sight, parts.store, operators)
            if unseen is not None:
                raise missing(unseen.name, asked.get(unseen.key, asked.get(unseen.name.removesuffix("s"), "")))
        return principal

    return check


async def read_body(request: Request) -> bytes:
    """Return the body. Raises Refusal 413 as soon as it is too long, 408 on timeout."""
    timeout_s = services(request).config.ingest.body_timeout_s
    return await raw_http.read_body(request.receive, request.headers, BODY_BYTES_MAX, timeout_s, "the API's limit")


def among(names: Sequence[str]) -> Callable[[str | None], str | None]:
    """Return a validator that refuses a filter value not in ``names``, which would silently match nothing."""

    def check(name: str | None) -> str | None:
        if name is not None and name not in names:
            raise ValueError(f"{name[:80]!r} is unknown; expected one of {', '.join(names)}{did_you_mean(name, names)}")
        return name

    return check


Body = Annotated[bytes, Depends(read_body)]
Somebody = Annotated[Principal, Depends(somebody)]
Reader = Annotated[Principal, Depends(needs("read"))]
Operator = Annotated[Principal, Depends(needs("operate"))]


def seen_by(request: Request, _: Reader) -> Sight | None:
    """Return what the reader sees; None: all jobs."""
    found: Sight | None = request.scope["state"].get(SIGHT)
    return found


Seen = Annotated[Sight | None, Depends(seen_by)]
Admin = Annotated[Principal, Depends(needs("admin"))]
Limit = Annotated[int, Query(ge=1, le=PAGE_LIMIT_MAX, description="How many items at most.")]
Reason = Annotated[str, Query(max_length=1_000, description="Kept with the record and in the audit trail.")]
Search = Annotated[str, Query(max_length=253, description="A part of the name, whatever its case.")]
FaultName = Annotated[str | None, Query(json_schema_extra={"enum": [*FAULT_NAMES]}), AfterValidator(among(FAULT_NAMES))]
EventType = Annotated[
    str | None,
    Query(description="An event's type.", json_schema_extra={"enum": [*EVENT_TYPES]}),
    AfterValidator(among(EVENT_TYPES)),
]
Moment = Annotated[str, Query(max_length=64, description="RFC 3339, or Unix seconds.", json_schema_extra={**TIME})]
Since = Annotated[
    str | None, Query(max_length=64, description="RFC 3339, or Unix seconds.", json_schema_extra={**TIME})
]
Cell = Annotated[str | None, Query(max_length=32, description="Only what this cell judges.")]
Cursor = Annotated[str | None, Query(max_length=200, description="The next of the page before.")]


def decoded(body: bytes, shape: type[StructT]) -> StructT:
    """Return the JSON body as ``shape``. Raises Refusal 400 naming the field and what was expected."""
    try:
        try:
            return msgspec.json.decode(body or b"{}", type=shape)
        except msgspec.ValidationError:  # JSON has one kind of number: 1.0 is an integer, too
            return msgspec.convert(_whole(msgspec.json.decode(body or b"{}")), type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, "body", f"the body is not as expected: {error}"[:2000]) from None


def body_of(shape: Any, constraints: Mapping[str, Constraint] = _NONE, *, required: bool = True) -> dict[str, Any]:
    """Return the ``openapi_extra`` of an endpoint's JSON body; ``constraints`` are those of some of its fields."""
    schema = msgspec.json.schema(shape, ref_template="#/components/schemas/{name}")
    plain = _merged(_inlined(schema, schema.get("$defs", {})), {"properties": constraints} if constraints else {})
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": plain}}}}


def answer(value: Any, status: int = 200) -> Response:
    """Return the value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def listing(page: Page[RecordT], view: Callable[[RecordT], dict[str, Any]]) -> Response:
    """Return a page as JSON."""
    return answer({"items": [view(record) for record in page.items], "next": page.next})


def given(**filters: str | None) -> dict[str, str]:
    """Return the filters that are set."""
    return {name: value for name, value in filters.items() if value is not None}


def found(parts: Stores, kind: Kind[RecordT], key: str) -> RecordT:
    """Return the record. Raises Refusal 404."""
    record = parts.store.get(kind, key)
    if record is None:
        raise missing(kind.name, key)
    return record


def moment_s(name: str, text: str) -> float:
    """Return the Unix seconds of a parameter in RFC 3339 or Unix seconds. Raises Refusal 400."""
    try:
        return unix_seconds(text)
    except ValueError as error:
        raise Refusal(400, "time", f"{name}: {error}"[:2000]) from None


def missing(kind: str, key: str) -> Refusal:
    """Return the refusal for a record that does not exist."""
    return Refusal(404, "not_found", f"none of the {kind} is called {key[:200]!r}; GET /api/v1/{kind} lists them")


def audited(parts: Times, principal: Principal, verb: str, subject: str, detail: str = "") -> AuditEntry:
    """Return an entry for the audit trail."""
    return AuditEntry(time_s=parts.clock.now_s(), who=principal.who, verb=verb, subject=subject, detail=detail[:4096])


def _whole(value: Any) -> Any:
    """Return the decoded JSON with whole floats as integers."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_MAX else value


def _merged(schema: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with ``more`` merged in recursively."""
    both = {key for key in schema.keys() & more.keys() if isinstance(schema[key], dict)}
    return {**schema, **more, **{key: _merged(schema[key], more[key]) for key in both}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return the schema with its references replaced: OpenAPI's components are FastAPI's, not ours."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items() if name != "$defs"}
