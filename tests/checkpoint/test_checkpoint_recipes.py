"""The recipes of docs/how-to/checkpoint-recipes.md that are marked as run, as they stand there."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[checkpoint]")

from benchmarks.checkpoint.job import state_number  # noqa: E402
from tests.agent import two_ranks  # noqa: E402
from tests.checkpoint import kept_training  # noqa: E402
from tests.checkpoint.kept_training import Course, Killed, abandon, course, until_whole  # noqa: E402
from tests.checkpoint.stores import Node  # noqa: E402

# torchdata's imports warn of what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 3
node = kept_training.node
_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoint-recipes.md"
_RUN = re.compile(r"<!-- run by tests/checkpoint/test_checkpoint_recipes\.py -->\n```python\n([^`]*)```")
_SECTIONS = _PAGE.read_text(encoding="utf-8").split("\n## ")
RECIPES = {section.partition("\n")[0]: found[1] for section in _SECTIONS if (found := _RUN.search(section))}


def run(recipe: str, names: dict[str, Any], directory: Path) -> None:
    exec(RECIPES[recipe].replace('"/shared/checkpoints"', repr(str(directory))), names)


def test_a_loader_with_a_state_goes_on_behind_the_last_batch(node: Node, tmp_path: Path) -> None:
    reason = "torchdata is not installed: pip install torchdata"
    pytest.importorskip("torchdata.stateful_dataloader", reason=reason)

    def read(path: str, seed: int, *, stops_at: int = -1) -> list[list[int]]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(1, 1)
        batches: list[list[int]] = []

        def train(batch: Any) -> None:
            step = names["step"]
            until_whole(names["checkpointer"], step)
            if step == stops_at:
                raise Killed
            batches.append(batch.tolist())

        optimizer = torch.optim.AdamW(model.parameters())
        names: dict[str, Any] = {"dataset": range(12), "model": model, "optimizer": optimizer, "train": train}
        with suppress(Killed):
            run("Data loaders with a state", names, tmp_path / path)
        abandon(names["checkpointer"])
        return batches

    undisturbed = read("undisturbed", 5)
    assert read("killed", 5, stops_at=2) == undisturbed[:2]
    assert read("killed", 6) == undisturbed[2:]


def one_attempt(recipe: str, folder: Path, name: str) -> None:
    """Train from where the checkpoint is up to the last step, saying what there was at first and after each step."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10 * rank + (1 if name == "killed" else 2))  # one name and shape on both ranks, and other numbers
    part = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    say = Course(folder / f"{name}-{rank}")
    names: dict[str, Any] = {
        "model_parts": [part], "optimizers": [optimizer], "stage": rank, "rank": rank,
        "tensors": dict(part.named_parameters()),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
    }  # fmt: skip
    by_tensors = "of_rank" in RECIPES[recipe]
    run(recipe, names, folder)
    checkpointer = names["checkpointer"]
    step = checkpointer.restore()
    while True:
        known = state_number(part, torch.optim.SGD(part.parameters())) if by_tensors else state_number(part, optimizer)
        say(step=step, number=known, random=torch.get_rng_state().sum().item())
        if step == STEPS:
            break
        step += 1
        optimizer.zero_grad()
        part(torch.rand(2, 4)).square().mean().backward()
        optimizer.step()
        checkpointer.capture(step)
        until_whole(checkpointer, step)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["Pipeline stages", "Megatron-LM, Megatron Bridge, NeMo"])
def test_what_ranks_name_apart_is_restored_on_each(recipe: str, node: Node, tmp_path: Path) -> None:
    job = f"""
        import functools, signal, sys
        from pathlib import Path
        import torch
        from tests.checkpoint import attempts, test_checkpoint_recipes as shared

        for name, code in (("killed", -signal.SIGKILL), ("resumed", 0)):
            train = functools.partial(shared.one_attempt, {recipe!r}, Path(sys.argv[1]), name)
            assert attempts.attempt(train, 2) == [code, code]
        """
    done = two_ranks.job(job, str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
    last = [course(tmp_path / f"killed-{rank}")[-1] for rank in (0, 1)]
    assert last[0]["number"] != last[1]["number"]
    assert [course(tmp_path / f"resumed-{rank}") for rank in (0, 1)] == [[last[0]], [last[1]]]


TITAN_STEPS, KILLED_AT = 4, 2


def one_titan(folder: Path, name: str) -> None:
    """Train by torchtitan's own loop, saying what each step was like; "killed" ends after one."""
    from tests.checkpoint.small_torchtitan import checkpointers, configured, digests

    names: dict[str, Any] = {}
    run("torchtitan", names, folder / "shared")
    kept: Any = checkpointers.CheckpointManager if name == "undisturbed" else names["MemoryCheckpointManager"]
    say = Course(folder / f"{name}-{os.environ['RANK']}")

    class Watched(kept):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(kept.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Config, **parts: Any) -> None:
            super().__init__(config, **parts)
            self.parts = parts

        def load(self, step: int = -1) -> Any:
            loaded = super().load(step)
            self.tell()
            return loaded

        def save(self, curr_step: int, last_step: bool = False) -> Any:
            saved = super().save(curr_step, last_step)
            self.tell()
            if name == "killed":
                until_whole(self.memory, curr_step)
                if curr_step == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
            return saved

        def tell(self) -> None:
            trainer = self.parts["states"]["train_state"]
            rates = [group["lr"] for one in self.parts["optimizers"] for group in one.param_groups]
            say(step=trainer.step, rates=rates, tokens=trainer.ntokens_seen, **digests(trainer))

    trainer = configured(folder, Watched.Config(), TITAN_STEPS, seed=2 if name == "resumed" else 1).build()
    trainer.train()
    trainer.close()


@pytest.mark.slow
def test_torchtitan_goes_on_bit_by_bit_where_it_was_killed(node: Node, tmp_path: Path) -> None:
    if find_spec("torchtitan") is None:  # nor imported here: it would look for GPUs
        pytest.skip("torchtitan is not installed: pip install torchtitan")
    job = """
        import functools, signal, sys
        from pathlib import Path
        from tests.checkpoint import attempts, small_torchtitan, test_checkpoint_recipes as shared

        for name, code in (("undisturbed", 0), ("killed", -signal.SIGKILL), ("resumed", 0)):
            train = functools.partial(shared.one_titan, Path(sys.argv[1]), name)
            assert attempts.attempt(train, 2) == [code, code], name
        """
    done = two_ranks.job(job, str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in (0, 1):
        undisturbed, killed, resumed = (
            course(tmp_path / f"{name}-{rank}") for name in ("undisturbed", "killed", "resumed")
        )
        assert [step["step"] for step in undisturbed] == [0, 1, 2, 3, 4]
        assert killed[1:] == undisturbed[1 : KILLED_AT + 1]
        assert resumed == undisturbed[KILLED_AT:]
