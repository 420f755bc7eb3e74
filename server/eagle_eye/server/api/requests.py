"""What endpoints share: the server's components, authentication, bodies, constraints, pagination, errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from pydantic import AfterValidator
from starlette.exceptions import HTTPException

from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.schema.names import NAME_CHARS_MAX, did_you_mean
from eagle_eye.schema.problem import CONTENT_TYPE, problem
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.api.filter_values import FAULT_NAMES
from eagle_eye.server.api.visibility import SIGHT, JobOwners, Sight, admitted
from eagle_eye.server.delivery.webhook import URL_CHARS_MAX
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import (
    NO_HEADERS,
    BadCursor,
    HistoryUnavailable,
    IllegalTransition,
    Refusal,
    StoreUnavailable,
    TargetRefused,
)
from eagle_eye.server.model.event_filters import LABELS
from eagle_eye.server.model.records import AuditEntry, Scope
from eagle_eye.server.security.auth import Limits, Principal, Tokens
from eagle_eye.server.security.people import People
from eagle_eye.server.store.store import PAGE_LIMIT_MAX, Kind, Page, Store
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import raw_http
from eagle_eye.server.transport.raw_http import register_name_convertor

# Constraints as JSON Schema, for /openapi.json. The endpoints check them with more detailed errors.

Constraint = Mapping[str, Any]

_YEAR = "(19(7[1-9]|[89][0-9])|20([0-8][0-9]|9[0-8]))"
_DAY = "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31"
_LEAP_DAY = "(19(72|76|80|84|88|92|96)|20([02468][048]|[13579][26]))-02-29"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS = r"[0-9]{1,9}(\.[0-9]{1,9})?|[1-3][0-9]{9}(\.[0-9]{1,9})?"
# RFC 3339 with an offset, or Unix seconds. Excludes the first and last year: an offset may move them out of range.
TIME: Constraint = MappingProxyType(
    {
        "maxLength": 64,
        "pattern": f"^(({_YEAR}-({_DAY})|{_LEAP_DAY})T{_CLOCK}|{_SECONDS})$",
    }
)
# No control characters, no white space except the space, nothing invisible.
_PRINTABLE = r"[^\x00-\x1f\x7f-\xa0\xad\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]"
NAME: Constraint = MappingProxyType(
    {"minLength": 1, "maxLength": NAME_CHARS_MAX, "pattern": f"^{_PRINTABLE}{{1,{NAME_CHARS_MAX}}}$"}
)
NAME_OR_NONE: Constraint = MappingProxyType(
    {"maxLength": NAME_CHARS_MAX, "pattern": f"^{_PRINTABLE}{{0,{NAME_CHARS_MAX}}}$"}
)
WEBHOOK_URL: Constraint = MappingProxyType(
    {
        "format": "uri",
        "pattern": r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?#][^\s\\\x00-\x20\x7f]*)?$",
        "minLength": 8,
        "maxLength": URL_CHARS_MAX,
    }
)
_FOUR = "[A-Za-z0-9+/]{4}"
_PADDED = "([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)"
# The base64 of 24 to 64 bytes; "" has the server generate one.
SECRET: Constraint = MappingProxyType(
    {"pattern": f"^(whsec_(({_FOUR}){{8,21}}|({_FOUR}){{8,20}}{_PADDED}|({_FOUR}){{21}}[A-Za-z0-9+/]{{2}}==))?$"}
)
EVENT_TYPE: Constraint = MappingProxyType({"enum": [*EVENT_TYPES]})


def list_of(item: Constraint, most: int) -> dict[str, Any]:
    """Return the schema of a list of at most ``most`` items."""
    return {"maxItems": most, "items": dict(item)}


def matcher(chars_max: int) -> dict[str, Any]:
    """Return the schema of ``label=glob`` or ``label!=glob``."""
    value = r'("[^"]+"|[^\s"~][^\x00]*)'
    return {"maxLength": chars_max, "pattern": rf"^\s*({'|'.join(LABELS)})\s*!?=\s*{value}$"}


# Parameters, bodies and answers.

BODY_BYTES_MAX = 4 << 20  # a job of 100,000 ranks fits
register_name_convertor()  # {job:name} and {node:name} in the endpoints' paths
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


# Every error as problem details (RFC 9457).

_log = logging.getLogger(__name__)
_RETRY_LATER: Mapping[str, str] = {"Retry-After": "5"}


def answer_problems(app: FastAPI, telemetry: Telemetry) -> None:
    """Install handlers that answer every error with a problem document and count it by reason."""

    def respond(status: int, reason: str, detail: str, headers: Mapping[str, str] = NO_HEADERS) -> Response:
        telemetry.refused.labels(reason).inc()
        document = msgspec.json.encode(problem(status, reason, detail))
        return Response(document, status, dict(headers), media_type=CONTENT_TYPE)

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)  # noqa: S101 - registered for it
        return respond(error.status, error.reason, error.detail, error.headers)

    async def on_cursor(_: Request, error: Exception) -> Response:
        return respond(400, "cursor", str(error))

    async def on_transition(_: Request, error: Exception) -> Response:
        return respond(409, "state", str(error))

    async def on_target(_: Request, error: Exception) -> Response:
        return respond(400, "target", str(error))

    async def on_storage(_: Request, error: Exception) -> Response:
        return respond(503, "storage", str(error), _RETRY_LATER)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
        return await on_refusal(request, _refusal(app, request, error))

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for it
        return respond(400, "parameter", "; ".join(_parameter(item) for item in error.errors())[:2000])

    async def on_bug(request: Request, error: Exception) -> Response:
        # Only the type of error is sent; its text may contain anything.
        said = {"method": request.method, "path": request.url.path}
        _log.error("a request failed for a reason that was not foreseen", exc_info=error, extra=said)
        telemetry.failures.labels("api").inc()
        return respond(500, "internal", "the server failed; its log says why")

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(BadCursor, on_cursor)
    app.add_exception_handler(IllegalTransition, on_transition)
    app.add_exception_handler(TargetRefused, on_target)
    app.add_exception_handler(StoreUnavailable, on_storage)
    app.add_exception_handler(HistoryUnavailable, on_storage)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)


def _refusal(app: FastAPI, request: Request, error: HTTPException) -> Refusal:
    if error.status_code == 405:  # starlette names the methods of one of the path's routes
        return raw_http.method_refusal(request.method, raw_http.methods_of_route(app, request.scope))
    if error.status_code == 404:
        return Refusal(404, "not_found", "nothing is here; /openapi.json lists what there is")
    return Refusal(error.status_code, "http", str(error.detail), error.headers or NO_HEADERS)


def _parameter(item: Mapping[str, object]) -> str:
    where = item.get("loc", ())
    name = ".".join(str(part) for part in where[1:]) if isinstance(where, tuple) else ""
    return f"{name or 'request'}: {_complaint(item)}"


def _complaint(item: Mapping[str, object]) -> str:
    said = str(item.get("msg", "is not as expected")).removeprefix("Value error, ")
    given = item.get("input")
    if item.get("type") == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", said)
        return f"{given[:80]!r} is unknown; expected one of {', '.join(known)}{did_you_mean(given, known)}"
    return said
