"""Every path tells which methods it takes, and gives the head of what it gives (RFC 9110)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from eagle_eye.server.web.dispatcher import read_page
from tests.server.builders import NOW, Running, body, frame, running
from tests.server.test_flood import until
from tests.server.test_openapi import KNOWN, one_of_each

METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data"), limits__address_burst=1_000_000) as found:
        found.send(body(frame()))
        one_of_each(found)
        yield found


@pytest.fixture(scope="module")
def taken(server: Running) -> dict[str, set[str]]:
    """Return the methods of each path, by what the server says of itself; the page's files beside."""
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    paths = {re.compile(re.sub(r"{\w+}", "[^/]+", path)): one for path, one in document["paths"].items()}
    found = {}
    for path in (template.format(**KNOWN) for template in document["paths"]):
        # A fixed path may also be a name's: a node can be called "forget".
        found[path] = {method.upper() for known, one in paths.items() if known.fullmatch(path) for method in one}
    assert found
    return found | {path: {"GET"} for path in (*read_page(), "/openapi.json")}


def with_implied(methods: set[str]) -> set[str]:
    return methods | ({"HEAD", "OPTIONS"} if "GET" in methods else {"OPTIONS"})


def allowed(header: str) -> set[str]:
    return set(header.split(", "))


def test_a_refused_method_is_told_all_that_the_path_takes(server: Running, taken: dict[str, set[str]]) -> None:
    for path, methods in taken.items():
        for method in (*METHODS, "TRACE", "BREW"):
            if method not in methods:
                answer = server.client.request(method, path)
                assert answer.status_code == 405, (method, path)
                assert allowed(answer.headers["allow"]) == with_implied(methods), (method, path)
                assert answer.json()["reason"] == "method"


def test_options_tells_them_without_a_token(server: Running, taken: dict[str, set[str]]) -> None:
    for path, methods in taken.items():
        answer = server.client.options(path)
        assert (answer.status_code, answer.content) == (204, b""), path
        assert allowed(answer.headers["allow"]) == with_implied(methods), path


def test_options_of_what_is_not_there_is_not_found(server: Running) -> None:
    assert server.client.options("/api/v1/nothing").status_code == 404


@pytest.mark.parametrize("path", ["/api/v1/jobs/a%2Fb", "/api/v1/nodes/a%2Fb"])
def test_names_with_slashes_have_methods_too(server: Running, path: str) -> None:
    assert "GET" in allowed(server.client.options(path).headers["allow"])


def test_head_answers_as_get_does_without_the_body(server: Running, taken: dict[str, set[str]]) -> None:
    for path in (path for path, methods in taken.items() if "GET" in methods and path != "/api/v1/events"):
        query = {"metric": "gpu_power_watts", "node": "n1", "start": str(NOW - 60), "end": str(NOW), "log_path": "/x"}
        asked = query if "query_range" in path or "nvrx" in path or "recording" in path else None
        whole, head = server.client.get(path, params=asked), server.client.head(path, params=asked)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert len(whole.content) > 0, path
        changing = {"date", "content-length"} if path == "/metrics" else {"date"}
        assert head.headers.keys() == whole.headers.keys(), path
        for name in set(whole.headers) - changing:
            assert head.headers[name] == whole.headers[name], (path, name)


def test_head_of_a_stream_ends(server: Running) -> None:
    head = server.client.head("/api/v1/events")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
    assert server.client.get("/healthz").status_code == 200  # over the same connection
    until(lambda: server.dispatcher.services.open_streams.count == 0)


def test_head_of_what_takes_none_is_refused(server: Running) -> None:
    answer = server.client.head("/api/v1/frames")
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")
