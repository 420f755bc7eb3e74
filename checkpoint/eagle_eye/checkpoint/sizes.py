"""Sizes in memory as people write them. Pure."""

from __future__ import annotations

import re

_KINDS = "KMGT"
_WRITTEN = re.compile(rf"(\d{{1,18}}(?:\.\d{{1,9}})?) ?(?:([{_KINDS}])(iB|B)?|B)?", re.ASCII)


def size_bytes(text: str) -> int:
    """Return the bytes of 3GiB (or 3G, as Slurm has it), 500MB or 1048576. Raises ValueError."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a size such as 3GiB, 500MB or 1048576, got {text[:80]!r}")
    number, kind, unit = found.groups()
    base = 1_000 if unit == "B" else 1_024
    return round(float(number) * base ** (_KINDS.index(kind) + 1)) if kind else round(float(number))


def reported(size: int) -> str:
    """Return so many bytes in the largest unit of which there is one: 3.0 GiB."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_KINDS))
    return f"{size / 1_024**power:.1f} {_KINDS[power - 1]}iB" if power else f"{size} bytes"
