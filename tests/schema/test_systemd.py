"""What a service makes of systemd's environment, whatever is in it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.service import ADDRESS_BYTES_MAX, notify_address, watchdog_s


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_address_is_a_path_or_an_abstract_name_that_the_kernel_takes(text: str) -> None:
    address = notify_address({"NOTIFY_SOCKET": text})
    assert len(address) <= ADDRESS_BYTES_MAX
    assert address == b"" or address[:1] in (b"/", b"\0")


@given(st.text(), st.text())
def test_a_deadline_is_positive_whatever_stands_there(text: str, meant_for: str) -> None:
    assert watchdog_s({"WATCHDOG_USEC": text, "WATCHDOG_PID": meant_for}, 1) > 0


def test_another_processs_deadline_is_not_ours() -> None:
    assert watchdog_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 7) == 3.0
    assert watchdog_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 8) == math.inf
