"""The denoising autoencoder with a narrow middle layer: trained with torch, exported as plain arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from eagle_eye.detectors.signs.learned_model import AutoencoderLayer
from eagle_eye.detectors.types import Floats

EPOCHS = 60
TRIM_EPOCHS = 20  # after which the worst-fitting windows are removed
TRIM_RATIO = 0.02  # healthy history is never entirely healthy
BATCH = 256
BATCHES_MAX = 400  # per epoch: more history gives better samples, not longer training
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-5
HIDDEN_RATIO, CODE_RATIO = 2, 6  # the input is this many times as wide
HIDDEN_MAX, CODE_MIN = 128, 2
DROPPED_RATIO = 0.1  # of the inputs are masked: it must learn how metrics relate (Vincent et al. 2008)


def network(width: int) -> nn.Sequential:
    """Return an untrained autoencoder."""
    hidden = min(max(width // HIDDEN_RATIO, CODE_MIN), HIDDEN_MAX)
    code = max(width // CODE_RATIO, CODE_MIN)
    return nn.Sequential(
        nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, code), nn.Tanh(),
        nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, width),
    )  # fmt: skip


def train(inputs: Floats, seed: int, epochs: int = EPOCHS) -> nn.Sequential:
    """Return an autoencoder of (N, width) inputs, NaN where not observed; the same for the same seed and inputs.

    Leaves torch's own random state and number of threads as they were.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, and the machine is left to others
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _trained(torch.from_numpy(np.array(inputs, np.float32)), epochs)
    finally:
        torch.set_num_threads(threads)


def _trained(inputs: Tensor, epochs: int) -> nn.Sequential:
    known = torch.isfinite(inputs)
    filled = torch.where(known, inputs, 0.0)
    model = network(inputs.shape[1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for epoch in range(epochs):
        if epoch == min(TRIM_EPOCHS, epochs // 3):
            keep = _ordinary(model, filled, known)
            filled, known = filled[keep], known[keep]
        order = torch.randperm(len(filled))[: BATCHES_MAX * BATCH]
        for batch in torch.split(order, BATCH):
            value, mask = filled[batch], known[batch]
            shown = value * (torch.rand_like(value) >= DROPPED_RATIO)
            # Linear beyond a few deviations: outliers in training must not distort the rest.
            loss = nn.functional.smooth_l1_loss(model(shown), value, beta=3.0, reduction="none")
            loss = (loss * mask).sum() / mask.sum().clamp(min=1)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
    return model


def _ordinary(model: nn.Sequential, filled: Tensor, known: Tensor) -> Tensor:
    """Return the rows without those that fit worst."""
    with torch.no_grad():
        error = ((model(filled) - filled) ** 2 * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)
    return torch.argsort(error)[: max(int(len(error) * (1 - TRIM_RATIO)), 1)].sort().values


def exported(model: nn.Sequential) -> tuple[AutoencoderLayer, ...]:
    """Return the network's weights as arrays."""
    linear = [part for part in model if isinstance(part, nn.Linear)]
    return tuple(AutoencoderLayer(p.weight.detach().numpy().copy(), p.bias.detach().numpy().copy()) for p in linear)
