"""``python -m benchmarks.detection``: the detection suite."""

from __future__ import annotations

import sys

from benchmarks.detection.suite import main

if __name__ == "__main__":
    sys.exit(main())
