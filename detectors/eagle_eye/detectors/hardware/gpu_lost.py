"""Detects a GPU that has fallen off the PCIe bus."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.signs.gpu_errors import at_once, gpu, gpu_errors, uses
from eagle_eye.detectors.types import Evidence, Verdict, Window

CONFIDENCE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """Finds ``gpu_lost``: the kernel's or NVML's word (XID 79, "GPU is lost"), or a PCI device that is gone. A fact.

    Source: NVIDIA, XID Errors (79: restart the bare metal). If the driver asks for less (XID 154), or no rank of the
    job runs on the GPU, the node is drained instead. Several nodes at one moment (a fourth of the job and at least
    three) are reported together and none is accused. Reads events only. Cannot see: a lost GPU if the node's kernel log
    is not read and its agent sees no PCI bus; GpuHang then finds its values gone.
    """

    name: str = "gpu_lost"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a lost GPU, or a single one if too many lost theirs at once."""
        lost = self._lost(window) if window.events else {}
        if not lost:
            return []
        by_node: dict[str, list[tuple[float, int, Evidence, bool]]] = {}
        for (node, device), (time_s, evidence, drain) in lost.items():
            by_node.setdefault(node, []).append((time_s, device, evidence, drain))
        times_s = {node: min(item[0] for item in items) for node, items in by_node.items()}
        together = at_once(window, times_s, max(times_s.values()))
        found = [self._verdict(window, (node,), by_node[node]) for node in by_node if node not in together]
        if together:
            found.append(self._verdict(window, together, [item for node in together for item in by_node[node]]))
        return found

    def _lost(self, window: Window) -> dict[tuple[str, int], tuple[float, Evidence, bool]]:
        """Return when each GPU was lost, the evidence, and whether draining its node suffices."""
        found: dict[tuple[str, int], tuple[float, Evidence, bool]] = {}
        for error in gpu_errors(window):
            if error.fact.kind == "lost" and (error.recovery != "none" or error.channel == "gpu_lost"):
                drain = error.recovery in ("drain_p2p", "drain_and_reset") or not uses(window, error.node, error.device)
                found.setdefault((error.node, error.device), (error.first_s, error.evidence, drain))
        return found

    def _verdict(
        self, window: Window, nodes: tuple[str, ...], items: list[tuple[float, int, Evidence, bool]]
    ) -> Verdict:
        items = sorted(items, key=lambda item: item[:2])
        onset_s, device, first, _ = items[0]
        alone = len(nodes) == 1
        what = gpu(nodes[0], device) if alone else f"GPUs of {len(nodes)} nodes at once ({', '.join(nodes[:4])})"
        more = f" (and {len(items) - 1} more of its GPUs)" if alone and len(items) > 1 else ""
        return Verdict(
            detector=self.name,
            fault="gpu_lost",
            job=window.job,
            nodes=nodes,
            node=nodes[0] if alone else None,
            device=device if alone and device >= 0 else None,
            confidence=CONFIDENCE,
            onset_s=min(onset_s, window.now_s),
            summary=f"{what}{more} left the PCIe bus: {first.metric} {first.value}",
            evidence=tuple(item[2] for item in items[:4]),
            kinds=frozenset({item[2].metric for item in items}),
            fact=True,
            asks="drain_node" if alone and all(drain for *_, drain in items) else None,
        )
