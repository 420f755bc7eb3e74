"""What a chart says in words."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.schema.labels import number
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import Band, Cast, Drawing, Floats, Stretch, drawing_of

ALONE = Cast((), None, (), 0, frozenset(), {})


def throttled(mask: int) -> Drawing:
    found = drawing_of("gpu_throttle_reasons", float(mask), "bitmask")
    assert found is not None
    return found


def first_said(values: list[float], drawing: Drawing) -> str:
    own: Floats = np.array(values)
    nothing = np.full(len(values), np.nan)
    found = Band(own, nothing, nothing, nothing, np.zeros(len(values)), 1, 0, 0)
    return plots.described(found, Stretch(0.0, 1.0, len(values)), drawing, ALONE, "n1 device 3", 1.0)[0]


@pytest.mark.parametrize(("value", "held"), [(1.0, "was"), (0.0, "was not")])
def test_bits_of_throttling_are_said_in_words(value: float, held: str) -> None:
    assert first_said([0.0, value], throttled(0x48)) == (
        f"At the verdict the clock of n1 device 3 {held} held down by hardware slowdown, hardware thermal slowdown."
    )


def test_a_mask_of_all_that_is_trouble_is_not_listed() -> None:
    assert plots.axis_label(throttled(0).metric, throttled(0)) == (
        "Whether the clock is held down by anything but an idle GPU or clocks set by a user"
    )


def test_a_count_of_one_has_a_singular_unit() -> None:
    said = [number(value, unit) for value, unit in [(1.0, "collectives"), (2.0, "collectives"), (1.0, "celsius")]]
    assert said == ["1 collective", "2 collectives", "1 °C"]
