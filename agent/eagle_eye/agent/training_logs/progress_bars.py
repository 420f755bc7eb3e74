"""tqdm's progress bars, as logged. Pure; never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_eye.agent.training_logs.quantities import number

_BAR = re.compile(
    r"^(?P<label>[^|%\n]{0,200}?):? {0,4}(?:[0-9]{1,3}%)?\|[^|]{0,400}\|"
    r" {0,12}(?P<done>[0-9]{1,12})/(?P<total>[0-9]{1,12})"
    r" \[[0-9:?]{1,12}<[0-9:?a-z, ]{1,24}, {0,4}"
    r"(?:(?P<rate>[0-9.?]{1,12})(?P<unit>s/it|it/s))?(?P<rest>[^\]]{0,2000})"
)


@dataclass(frozen=True)
class ProgressBar:
    """One state of a bar: ``done`` of ``total``, ``step_s`` seconds each (None: unknown), and the text around it.

    ``label`` is "" for a bar without one. ``postfix`` are the ``name=value`` pairs after the rate.
    """

    label: str
    done: int
    total: int
    step_s: float | None
    postfix: dict[str, str]


def bar(line: str) -> ProgressBar | None:
    """Parse the line as a bar; return None when it is not one."""
    found = _BAR.match(line)
    if found is None:
        return None
    rate = number(found["rate"] or "")
    step_s = None
    if rate is not None and rate > 0.0:
        step_s = rate if found["unit"] == "s/it" else 1.0 / rate
    postfix = {}
    for field in found["rest"].split(", "):
        name, equals, value = field.partition("=")
        if equals:
            postfix[name.strip()] = value
    return ProgressBar(found["label"].strip(), int(found["done"]), int(found["total"]), step_s, postfix)
