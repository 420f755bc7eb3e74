"""A store's status of a job as plain containers, for the command and for monitoring."""

from __future__ import annotations

import time
from typing import Any

from eagle_eye.checkpoint.held_job import HeldJob


def status_of(job: HeldJob) -> dict[str, Any]:
    """Return it. ``whole_step`` is the newest step that is whole on all, None where none is known to be.

    ``older_steps`` are those of the ``whole_steps`` that reach further back; of ``capture_every`` captures one is made.
    """
    now_s = time.monotonic()
    return {
        "job": job.name,
        "attempt": job.attempt,
        "nodes": sorted(job.members),
        "ranks_connected": sum(shard.connection is not None for shard in job.local),
        "whole_step": job.needed.newest_whole,
        "whole_steps": list(job.needed.known),
        "older_steps": list(job.needed.older),
        "capture_every": job.capture_every,
        "copies": [
            {
                "step": copy.step,
                "rank": copy.rank,
                "plan": copy.plan,
                "bytes": copy.length,
                "captured_s": copy.captured_s,
                "of_this_node": shard.local,
            }
            for shard, _, copy in sorted(job.copies(), key=lambda held: (held[2].step, held[2].rank))
        ],
        "reserved_bytes": job.reserved_bytes,
        "persisted_step": job.persisted,
        "persisting_step": job.needed.persisting,
        "persisting_for_s": _since(job.persisting_since_s, now_s) if job.needed.persisting is not None else None,
        "without_ranks_for_s": _since(job.left_s, now_s),
        "links": job.links(),
        "counts": dict(sorted(job.counts.items())),
        "troubles": list(job.troubles),
    }


def _since(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else round(now_s - then_s, 1)
