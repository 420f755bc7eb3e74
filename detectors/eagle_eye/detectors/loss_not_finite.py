"""A loss or gradient that is no number any more: everybody's, or one node's before it reached the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

SETTLE_INTERVALS = 3.0  # how long to wait for the rows of all ranks that cover the onset


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotFinite:
    """Tells silent corruption on one node from a loss that all ranks lost together.

    After the reduction all ranks hold the same broken numbers, so the loss says nothing about where they
    came from. The gradient before the reduction does: it is not finite on the culprit in a step whose loss still
    was, and finite on all others (a rank reports no local gradient norm for a step whose loss was not finite). The
    verdict waits until every rank's row of that moment has arrived. Blind where no rank reports a loss or gradient
    norm. Cannot see: corruption that leaves the numbers finite; which rank it was where local norms are not
    reported.
    """

    name: str = "loss_not_finite"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        shared = [m for m in ("train_loss", "train_grad_norm") if m in window.device]
        local = window.device.get("train_local_grad_norm")
        if not shared and local is None:
            raise Blind("no rank reports a loss or a gradient norm")
        broken = np.zeros((len(window.times_s), len(window.series)), dtype=np.bool_)
        for metric in shared:
            broken |= np.isposinf(window.device[metric])
        own = np.isposinf(local) if local is not None else np.zeros_like(broken)
        lines = np.flatnonzero((broken | own).any(axis=1))
        if len(lines) == 0:
            return []
        onset = int(lines[0])
        if not self._complete(window, onset):
            return []
        origins = sorted({window.series[i].node for i in np.flatnonzero(own.any(axis=0))})
        if local is not None and len(origins) == 1:
            return [self._corruption(window, origins[0], own)]
        return [self._loss(window, onset, broken | own, origins)]

    def _complete(self, window: Window, onset: int) -> bool:
        """Whether the rows of all heard nodes reach past the onset, or have had long enough to."""
        if window.now_s - float(window.times_s[onset]) > SETTLE_INTERVALS * window.interval_s:
            return True
        after = np.zeros(len(window.series), dtype=np.bool_)
        for values in window.device.values():
            after |= np.isfinite(values[onset + 1 :]).any(axis=0)
        return bool(after.all())

    def _corruption(self, window: Window, node: str, own: NDArray[np.bool_]) -> Verdict:
        column = next(i for i, series in enumerate(window.series) if series.node == node and own[:, i].any())
        line = int(np.flatnonzero(own[:, column])[0])
        local = window.device["train_local_grad_norm"]
        peers = np.delete(local[max(line - 1, 0) : line + 1], column, axis=1)
        peers = peers[np.isfinite(peers)]
        device = window.series[column].device
        return Verdict(
            detector=self.name,
            fault="silent_data_corruption",
            job=window.job,
            nodes=(node,),
            node=node,
            device=device,
            confidence=0.98,
            onset_s=float(window.times_s[line]) - window.interval_s,
            summary=(
                f"the gradient of rank {window.series[column].rank} on {node} was not finite before the reduction,"
                " in a step whose loss was; its peers' gradients were"
            ),
            evidence=(
                Evidence(
                    "train_local_grad_norm",
                    node,
                    device,
                    "not finite",
                    float(np.median(peers)) if len(peers) else None,
                ),
                Evidence("train_loss", node, device, "finite in that step"),
            ),
            kinds=frozenset({"local_gradient", "peers_gradient"}),
            fact=len(peers) > 0,
        )

    def _loss(self, window: Window, onset: int, broken: NDArray[np.bool_], origins: list[str]) -> Verdict:
        ranks = int(broken.any(axis=0).sum())
        if origins:
            why = f"{len(origins)} nodes' gradients broke before the reduction"
        elif "train_local_grad_norm" in window.device:
            why = "no rank's gradient broke before the reduction"
        else:
            why = "gradients before the reduction are not reported, so no rank can be told from another"
        return Verdict(
            detector=self.name,
            fault="loss_not_finite",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=0.95,
            onset_s=float(window.times_s[onset]) - window.interval_s,
            summary=f"the loss or gradient norm is not finite on {ranks} of {len(window.series)} ranks; {why}",
            evidence=(Evidence("train_loss", None, None, "not finite"),),
            kinds=frozenset({"loss"}),
            fact=True,
        )
