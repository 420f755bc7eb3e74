"""The LSTM variational autoencoder that Minder trains for each metric (arXiv 2411.01791, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.floating[Any]]

HIDDEN, LATENT, LAYERS = 4, 8, 1  # as published
LEARNING_RATE = 1e-2
BATCH = 256
STEPS_MAX = 3_000
GOOD_MSE = 1e-4  # Minder's models reconstruct their training windows better than this
KL_WEIGHT = 1e-5  # of the prior in the loss: more, and windows of a nearly constant metric all decode to their mean
CHECK_EVERY = 100


class LstmVae(nn.Module):
    """Encodes windows (B, w) into a latent normal distribution and decodes its mean into windows (B, w)."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.encoder = nn.LSTM(1, HIDDEN, LAYERS, batch_first=True)
        self.mean = nn.Linear(HIDDEN, LATENT)
        self.log_variance = nn.Linear(HIDDEN, LATENT)
        self.decoder = nn.LSTM(LATENT, HIDDEN, LAYERS, batch_first=True)
        self.out = nn.Linear(HIDDEN, 1)

    def encode(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance (B, 8) of the latent distribution."""
        _, (hidden, _) = self.encoder(windows.unsqueeze(-1))
        return self.mean(hidden[-1]), self.log_variance(hidden[-1])

    def decode(self, latent: Tensor) -> Tensor:
        """Return windows (B, w) from latent points (B, 8)."""
        repeated = latent.unsqueeze(1).expand(-1, self.window, -1)
        states, _ = self.decoder(repeated)
        return torch.as_tensor(self.out(states).squeeze(-1))


@dataclass(frozen=True, slots=True)
class Denoiser:
    """A trained model: windows in, what it makes of them out."""

    model: LstmVae
    mse: float

    def __call__(self, windows: Floats) -> Floats:
        """Return the reconstructions (B, w), decoded from the latent mean: no randomness."""
        with torch.inference_mode(), one_thread():
            mean, _ = self.model.encode(torch.from_numpy(np.ascontiguousarray(windows, dtype=np.float32)))
            return np.asarray(self.model.decode(mean).numpy())


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: at this size, threads mostly wait for each other, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(windows: Floats, seed: int, steps_max: int = STEPS_MAX) -> Denoiser:
    """Return a model trained on windows (B, w), until it reconstructs them to 1e-4 or ``steps_max`` is reached."""
    data = torch.from_numpy(np.ascontiguousarray(windows, dtype=np.float32))
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(seed)
        model = LstmVae(data.shape[1])
        optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        mse = float("inf")
        for step in range(1, steps_max + 1):
            batch = data[torch.randint(len(data), (min(BATCH, len(data)),))]
            mean, log_variance = model.encode(batch)
            latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
            error = torch.mean((model.decode(latent) - batch) ** 2)
            kl = -0.5 * torch.mean(1 + log_variance - mean**2 - log_variance.exp())
            optimiser.zero_grad()
            (error + KL_WEIGHT * kl).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if step % CHECK_EVERY == 0 or step == steps_max:
                with torch.no_grad():
                    mse = float(torch.mean((model.decode(model.encode(data)[0]) - data) ** 2))
                if mse < GOOD_MSE:
                    break
    model.eval()
    return Denoiser(model, mse)
