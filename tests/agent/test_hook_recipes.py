"""The recipes of docs/how-to/hook-recipes.md that are marked as run, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.agent import hook  # noqa: E402
from tests.agent.fakes import REPOSITORY  # noqa: E402
from tests.agent.hearing import Hearing  # noqa: E402

STEPS = 4
_RUN = re.compile(r"<!-- run by tests/agent/test_hook_recipes\.py -->\n```python\n([^`]*)```")
_SECTIONS = (REPOSITORY / "docs/how-to/hook-recipes.md").read_text(encoding="utf-8").split("\n## ")
RECIPES = {section.partition("\n")[0]: found[1] for section in _SECTIONS if (found := _RUN.search(section))}


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hearing]:
    monkeypatch.setenv("EAGLE_EYE_HOOK_SOCKET", str(tmp_path / "hook.sock"))
    hearing = Hearing(tmp_path / "hook.sock")
    yield hearing
    hearing.close()


@pytest.fixture
def names() -> dict[str, Any]:
    """What a recipe takes for granted: a model, its optimizer, batches, the loss."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return {
        "torch": torch,
        "attach": hook.attach,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [torch.ones(2, 4)] * STEPS,
        "loss_of": lambda model, batch: model(batch).mean(),
    }


def reported(recipe: str, names: dict[str, Any], listener: Hearing) -> Any:
    """Run a recipe and return the last message that the agent heard."""
    exec(RECIPES[recipe], names)
    names["training"].detach()
    heard = listener.read()
    assert heard
    assert heard[-1].failures == 0
    return heard[-1]


def test_plain_pytorch_tells_steps_losses_norms_and_tokens(names: dict[str, Any], listener: Hearing) -> None:
    last = reported("PyTorch", names, listener)
    totals = last.totals
    assert (last.step, totals.losses, totals.grad_norms, totals.timed_tokens) == (STEPS, STEPS, STEPS, 8 * STEPS)


def test_fsdp_tells_steps_and_the_norm_of_all_ranks(names: dict[str, Any], listener: Hearing) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        last = reported("FSDP", names, listener)
    finally:
        torch.distributed.destroy_process_group()
    assert (last.step, last.totals.losses, last.totals.grad_norms) == (STEPS, STEPS, STEPS)
    assert last.totals.compute_steps == 0  # collectives are inside the model


@pytest.mark.filterwarnings("ignore")
def test_accelerate_tells_steps_of_the_optimizer_not_micro_batches(names: dict[str, Any], listener: Hearing) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-full installs it")
    names["accelerator"] = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    names["data"] = torch.utils.data.DataLoader([torch.ones(4)] * 2 * STEPS, batch_size=1)
    last = reported("Accelerate", names, listener)
    assert (last.step, last.totals.losses, last.totals.grad_norms) == (STEPS, STEPS, STEPS)
