"""A transformer in layers: ``job`` is what ``eagle-eye plan profile`` measures; run, it prints what its whole takes."""

from __future__ import annotations

import json
import statistics

import torch

LAYERS, ROUNDS = 6, 10


def job() -> tuple[torch.nn.Sequential, torch.Tensor]:
    """Return the layers, and a micro-batch."""
    layers = (
        torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    )
    return torch.nn.Sequential(*layers), torch.randn(16, 512, 1024)


def main() -> None:
    """Print the median time of a forward and backward pass through all layers at once, by the GPU's own clock."""
    model, inputs = job()
    model, inputs = model.cuda().train(), inputs.cuda().requires_grad_()
    took_s = []
    for turn in range(-2, ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        model(inputs).sum().backward()
        ended.record()
        ended.synchronize()
        if turn >= 0:
            took_s.append(began.elapsed_time(ended) / 1e3)
    print(json.dumps({"step_s": statistics.median(took_s), "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
