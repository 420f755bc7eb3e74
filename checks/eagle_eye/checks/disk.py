"""Writes a bounded file to a folder, syncs it, reads it back and compares."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_eye.checks import child, devices
from eagle_eye.checks.check import Check, CheckOptions, Measured, Result, could_not_check

BYTES = 256 << 20
QUICK_BYTES = 32 << 20


def run(asked: CheckOptions) -> Result:
    """Return whether the disk below the folder stores data correctly and in time."""
    folder = str(asked.site.folder)
    size = QUICK_BYTES if asked.quick else BYTES
    try:
        children = child.run("on_disk", {"folder": folder, "bytes": size}, 1, asked.until_s)
    except OSError as error:
        return could_not_check(f"the child cannot be started: {error.strerror or error}")

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        wrong = values["wrong_blocks"]
        source = "ours: what was written must come back"
        figures = [
            Measured(name="wrong_blocks", value=wrong, unit="1", device=device, threshold=0.0, source=source),
            Measured(name="sync_seconds_max", value=values["sync_seconds_max"], unit="s", device=device),
            Measured(name="read_bytes_per_second", value=values["read_bytes_per_second"], unit="B/s", device=device),
        ]
        reasons = [f"{wrong:.0f} blocks of 1 MiB came back wrong"] if wrong else []
        for name in ("sync_seconds", "write_bytes_per_second"):
            reason, figure = devices.measured(name, values[name], device, asked.site.thresholds[f"disk.{name}"])
            figures.append(figure)
            reasons += [reason] if reason else []
        return ", ".join(reasons), tuple(figures)

    return devices.result((folder,), children, judge, f"{folder}: {size >> 20} MiB written, synced and read back")


CHECK = Check(
    name="disk",
    needs="a folder on a disk (--folder)",
    measures="a file written, synced and read back: wrong blocks, how long a sync takes",
    limit_s=20.0,
    quick_limit_s=6.0,
    absent=lambda _asked: "",
    run=run,
)
