"""Tickets from files: what is taken, and errors that say where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.accounts import node_records
from eagle_eye.server.accounts.node_records import TicketFileWrong, TicketFormat, parse_tickets
from tests.server.builders import NOW

CSV = "id,node,opened,closed,text\nT-1,n1,2023-11-14T22:13:20Z,,GPU 3 gone\n"


def test_csv_and_json_lines_say_the_same() -> None:
    lines = '{"id": "T-1", "node": "n1", "opened": 1700000000, "closed": null, "text": "GPU 3 gone"}\n\n'
    assert parse_tickets(CSV, "csv", NOW) == parse_tickets(lines, "jsonl", NOW)
    (ticket,) = parse_tickets(CSV, "csv", NOW).tickets
    assert (ticket.id, ticket.node, ticket.opened_s, ticket.closed_s, ticket.text) == (
        "T-1",
        "n1",
        1_700_000_000,
        None,
        "GPU 3 gone",
    )


def test_an_export_may_have_other_columns_a_byte_order_mark_and_any_order() -> None:
    text = "\ufeffOpened,Priority,NODE,id\r\n1700000000,high,n1,7\r\n"
    found = parse_tickets(text, "csv", NOW)
    assert [(ticket.id, ticket.closed_s, ticket.text) for ticket in found.tickets] == [("7", None, "")]
    assert found.left_out == ["priority"]


def test_of_one_id_the_last_line_counts() -> None:
    found = parse_tickets(CSV + "T-1,n2,2023-11-14T22:13:20Z,2023-11-15T00:00:00Z,moved\n", "csv", NOW)
    assert [(ticket.node, ticket.text) for ticket in found.tickets] == [("n2", "moved")]


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("csv", "", "line 1: no column id, node, opened; expected a header with id,node,opened,closed,text"),
        ("csv", "id,node\n", "line 1: no column opened"),
        ("csv", "id,id,node,opened\n", "line 1, column id: it is there twice"),
        ("csv", CSV + "T-2,n1\n", "line 3: 2 cells; the header has 5"),
        ("csv", CSV + "T-2,n1,yesterday,,\n", "line 3, column opened: expected an RFC 3339 time with its offset"),
        (
            "csv",
            CSV + "T-2,n1,2023-11-14T22:13:20,,\n",
            "line 3, column opened: expected an RFC 3339 time with its offset",
        ),
        ("csv", CSV + "T-2,n1,,,\n", "line 3, column opened: it is empty"),
        ("csv", CSV + "T-2,n1,1700000000,1600000000,\n", "line 3, column closed: '1600000000' is before opened"),
        ("csv", CSV + ",n1,1700000000,,\n", "line 3, column id: expected 1 to 253 printable characters, got ''"),
        ("csv", CSV + "T-2,n\x1b1,1700000000,,\n", "line 3, column node: expected 1 to 253 printable characters"),
        ("csv", CSV + 'T-2,n1,1700000000,,"open\n', "line 3: no CSV"),
        ("jsonl", "[1]\n", "line 1: expected a JSON object, got list"),
        ("jsonl", '\n{"id": "T-1"', "line 2: no JSON"),
        ("jsonl", '{"id": true, "node": "n", "opened": 1}\n', "line 1, column id: expected 1 to 253"),
        ("jsonl", '{"id": 1, "node": ["n"], "opened": 1}\n', "line 1, column node: expected 1 to 253"),
        ("jsonl", '{"id": 1, "node": "n", "opened": true}\n', "line 1, column opened: expected an RFC 3339"),
        ("jsonl", '{"id": 1, "node": "n", "opened": 1e99}\n', "line 1, column opened: expected an RFC 3339"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_column(form: TicketFormat, text: str, message: str) -> None:
    with pytest.raises(TicketFileWrong) as refused:
        parse_tickets(text, form, NOW)
    assert str(refused.value).startswith(message)


def test_a_file_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_records, "TICKETS_MAX", 1)
    with pytest.raises(TicketFileWrong, match="line 3: more than 1 tickets; import the file in parts"):
        parse_tickets(CSV + "T-2,n1,1700000000,,\n", "csv", NOW)


def said(text: str, form: TicketFormat) -> str:
    """Return what is wrong with the text, "line" alone when nothing is."""
    try:
        parse_tickets(text, form, NOW)
    except TicketFileWrong as error:
        return str(error)
    return "line"


@given(text=st.text(max_size=300), form=st.sampled_from(["csv", "jsonl"]))
def test_no_text_is_more_than_wrong(text: str, form: TicketFormat) -> None:
    assert said(text, form).startswith("line")


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.integers())


@given(row=st.fixed_dictionaries({"id": values, "node": values, "opened": values}, optional={"closed": values}))
def test_no_object_is_more_than_wrong(row: dict[str, object]) -> None:
    assert said(json.dumps(row), "jsonl").startswith("line")
