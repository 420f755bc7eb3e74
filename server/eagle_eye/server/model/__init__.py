"""The basic types of the server: records, errors, times, labels, bounds.

Plain data and pure functions. Imports none of the server's other packages.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
