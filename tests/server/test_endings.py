"""No line in the log ends in a colon without the reason."""

from __future__ import annotations

import pytest

from eagle_eye.server.model.errors import how_it_ended, in_words


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (1, "OSError: disk full", "ended with 1: OSError: disk full"),
        (1, "", "ended with 1: it gave no reason"),
        (-9, "", "ended by SIGKILL: perhaps for lack of memory (see the kernel log)"),
        (-15, "", "ended by SIGTERM, without a word"),
        (-11, "Fatal Python error", "ended by SIGSEGV: Fatal Python error"),
        (-99, "", "ended by signal 99, without a word"),
    ],
)
def test_a_process_without_last_words_has_a_reason(code: int, said: str, words: str) -> None:
    assert how_it_ended(code, said) == words


@pytest.mark.parametrize(("error", "words"), [(TimeoutError(), "TimeoutError"), (OSError("full"), "OSError: full")])
def test_an_error_without_text_is_told_by_its_kind(error: Exception, words: str) -> None:
    assert in_words(error) == words
