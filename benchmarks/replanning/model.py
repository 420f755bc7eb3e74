"""The model whose layers are measured for the simulation: a small transformer with as many blocks as large ones."""

from __future__ import annotations

import torch
from torch import nn

BLOCKS = 24
WIDTH = 256
HEADS = 4
CONTEXT = 128
CHARACTERS = 512
MICRO_BATCH = 2


class Embedding(nn.Module):
    """The first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return what stands for text (batch, time), (batch, time, width)."""
        embedded: torch.Tensor = self.character(text) + self.place.weight
        return embedded


def job() -> tuple[list[nn.Module], torch.Tensor]:
    """Return the layers and a micro-batch, as ``eagle-eye plan profile`` takes them."""
    torch.set_num_threads(1)  # several would wait for each other wherever the cores have other work
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS))
    return [Embedding(), *blocks, head], torch.randint(CHARACTERS, (MICRO_BATCH, CONTEXT))
