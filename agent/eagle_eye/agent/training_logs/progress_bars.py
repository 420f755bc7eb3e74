"""tqdm's progress bars, as logged. Pure; never raises.

A bar's rate is not read: it is a mean over what the program pleases, an epoch with its evaluations, or a few recent
rounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_eye.agent.training_logs.quantities import NUMBER, number
from eagle_eye.agent.training_logs.reading import STEP_MAX

_BAR = re.compile(
    rf"^(?P<label>[^|%\n]{{0,200}}?):? {{0,4}}(?:[0-9]{{1,3}}%)?\|[^|]{{0,400}}\|"
    rf" {{0,12}}(?P<done>{NUMBER})/(?P<total>{NUMBER}|\?)"
    r" \[[0-9:?]{1,12}<[0-9:?a-z, ]{1,24}(?:, {0,4}[0-9.?]{1,12} ?[A-Za-z]{1,12}/[A-Za-z]{1,12})?"
    r"(?P<rest>[^\]]{0,2000})"
)


@dataclass(frozen=True)
class ProgressBar:
    """One state of a bar: ``done`` of ``total`` (None: unknown), and the text around it.

    ``label`` is "" for a bar without one. ``postfix`` are the ``name=value`` pairs after the rate.
    """

    label: str
    done: int
    total: int | None
    postfix: dict[str, str]


def bar(line: str) -> ProgressBar | None:
    """Parse the line as a bar; return None when it is not one."""
    found = _BAR.match(line)
    done = _count(found["done"]) if found is not None else None
    if found is None or done is None:
        return None
    postfix = {}
    for field in found["rest"].split(", "):
        name, equals, value = field.partition("=")
        if equals:
            postfix[name.strip()] = value
    return ProgressBar(found["label"].strip(), done, _count(found["total"]), postfix)


def _count(text: str) -> int | None:
    value = number(text)
    return int(value) if value is not None and 0 <= value < STEP_MAX else None
