"""Training by Hugging Face's Trainer that is killed after a step goes on as if nobody had killed it, bit by bit."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[checkpoint]")

from benchmarks.checkpoint.job import state_number  # noqa: E402
from eagle_eye.checkpoint.callback_transformers import LOGS_KEPT, keep_in_memory  # noqa: E402
from eagle_eye.checkpoint.store import ask_status  # noqa: E402
from tests.agent import two_ranks  # noqa: E402
from tests.checkpoint import kept_training  # noqa: E402
from tests.checkpoint.kept_training import Course, Killed, abandon, course, until_whole  # noqa: E402
from tests.checkpoint.stores import Node, until  # noqa: E402

# The trainer warns of much in a small test: of pinned memory, of what is deprecated next.
pytestmark = pytest.mark.filterwarnings("ignore")

FEATURES = 4
node = kept_training.node


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def model_of(say: Course) -> Any:
    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )

        def forward(self, x: Any, labels: Any = None) -> Any:
            found = self.net(x)
            loss = (found - labels).square().mean()
            if self.training:
                say(rows=x[:, 0].tolist(), loss=loss.item())
            return {"loss": loss, "logits": found}

    torch.manual_seed(3)
    return Model()


def rows(count: int) -> list[dict[str, Any]]:
    return [{"x": torch.full((FEATURES,), float(index)), "labels": torch.ones(1)} for index in range(count)]


def trainer_of(transformers: Any, path: Path, end: Callable[[int], None] | None = None, **options: Any) -> Any:
    """Return a trainer whose course is written to the path; ``end`` hears of each step, once it is whole."""
    say = Course(path)

    class Pace(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rates = [group["lr"] for group in trainer.optimizer.param_groups]
            say(step=state.global_step, epoch=state.epoch, rates=rates)
            if end is not None:
                until_whole(trainer.kept.checkpointer, state.global_step)
                end(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say(evaluated=state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            say(ended=state.global_step, number=state_number(trainer.model, optimizer))

    defaults = {
        "output_dir": str(path.parent / "output"),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
    }
    args = transformers.TrainingArguments(**{**defaults, **options})
    trainer = transformers.Trainer(
        model=model_of(say), args=args, train_dataset=rows(10), eval_dataset=rows(4), callbacks=[Pace()]
    )
    return trainer


def undisturbed_by(transformers: Any, path: Path, **options: Any) -> list[dict[str, Any]]:
    trainer_of(transformers, path, **options).train()
    return course(path)


def killed_after(transformers: Any, folder: Path, step: int, **options: Any) -> None:
    def end(done: int) -> None:
        if done == step:
            raise Killed

    trainer = trainer_of(transformers, folder / "killed", end, **options)
    trainer.kept = keep_in_memory(trainer, folder)
    with pytest.raises(Killed):
        trainer.train()
    abandon(trainer.kept.checkpointer)


def resumed_by(transformers: Any, folder: Path, **options: Any) -> Any:
    trainer = trainer_of(transformers, folder / "resumed", lambda _: None, **options)
    trainer.kept = keep_in_memory(trainer, folder)
    trainer.train()
    return trainer


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "evaluated by steps": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluated by epochs": {"eval_strategy": "epoch"},
    "a worker": {"dataloader_num_workers": 1},
    "a number of steps": {"max_steps": 8},
    "a plateau": {
        "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0}, "metric_for_best_model": "loss",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_goes_on_after_any_step_as_if_nobody_had_killed_it(
    transformers: Any, name: str, node: Node, tmp_path: Path
) -> None:
    options = SCENARIOS[name]
    undisturbed = undisturbed_by(transformers, tmp_path / "undisturbed", **options)
    steps = [line["step"] for line in undisturbed if line.get("step")]
    in_epoch = sum(line["epoch"] < 1 for line in undisturbed if "step" in line)
    for step in (steps[0], in_epoch, in_epoch + 1):  # in an epoch, at its end, and in the next one
        folder = tmp_path / f"killed-{step}"
        folder.mkdir()
        killed_after(transformers, folder, step, **options)
        resumed_by(transformers, folder, **options)
        resumed = course(folder / "resumed")
        assert resumed[0]["step"] == step
        assert resumed == undisturbed[-len(resumed) :]


def three_attempts(transformers: Any, folder: Path, world: int) -> None:
    """An undisturbed training, one whose processes are all killed after step 4, and one that goes on from there."""
    from tests.checkpoint import attempts

    def train(name: str, *, keeps: bool = True, end: Callable[[int], None] = lambda _: None) -> list[int]:
        def run() -> None:
            trainer = trainer_of(transformers, folder / f"{name}-{os.environ['RANK']}", end if keeps else None)
            if keeps:
                trainer.kept = keep_in_memory(trainer, folder)
            trainer.train()

        return attempts.attempt(run, world)

    def kill(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    assert train("undisturbed", keeps=False) == [0] * world
    assert train("killed", end=kill) == [-signal.SIGKILL] * world
    assert train("resumed") == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_processes_that_are_killed_go_on_as_if_nobody_had_killed_them(
    transformers: Any, world: int, node: Node, tmp_path: Path
) -> None:
    job = f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import transformers
        from pathlib import Path
        from tests.checkpoint import test_callback_transformers as shared

        transformers.Trainer
        shared.three_attempts(transformers, Path(sys.argv[1]), {world})
        """
    done = two_ranks.job(job, str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(world):
        resumed = course(tmp_path / f"resumed-{rank}")
        assert resumed[0]["step"] == 4
        assert resumed == course(tmp_path / f"undisturbed-{rank}")[-len(resumed) :]


def test_steps_are_captured_and_micro_batches_are_not(transformers: Any, node: Node, tmp_path: Path) -> None:
    trainer = resumed_by(transformers, tmp_path, gradient_accumulation_steps=2)
    assert trainer.state.global_step == trainer.kept.checkpointer.counts["captured"] == 6


def test_the_memory_is_freed_when_training_has_ended(transformers: Any, node: Node, tmp_path: Path) -> None:
    resumed_by(transformers, tmp_path)
    until(lambda: not ask_status(node.folder), "the store knows no job any more")


def test_what_callbacks_and_logs_know_goes_on(transformers: Any, node: Node, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}

    def train(name: str, stops_at: int) -> tuple[int, list[dict[str, Any]]]:
        def end(done: int) -> None:
            if done == stops_at:
                raise Killed

        trainer = trainer_of(transformers, tmp_path / name, end, **options)
        stopping = transformers.EarlyStoppingCallback(100)
        trainer.add_callback(stopping)
        trainer.kept = keep_in_memory(trainer, tmp_path)
        with pytest.raises(Killed):
            trainer.train()
        abandon(trainer.kept.checkpointer)
        return stopping.early_stopping_patience_counter, trainer.state.log_history

    killed = train("killed", 7)
    assert killed[0] > 0
    assert train("resumed", 7) == killed


def test_a_log_that_grows_without_end_is_kept_as_far_as_its_newest_entries(
    transformers: Any, node: Node, tmp_path: Path
) -> None:
    trainer = trainer_of(transformers, tmp_path / "course", lambda _: None)
    trainer.kept = keep_in_memory(trainer, tmp_path)
    trainer.train()
    trainer.state.log_history = [{"step": number} for number in range(2 * LOGS_KEPT)]
    kept = trainer.kept._progress.state_dict()["logs"]
    assert kept == [{"step": number} for number in range(LOGS_KEPT, 2 * LOGS_KEPT)]


def test_what_cannot_be_kept_does_not_stop_training(transformers: Any, node: Node, tmp_path: Path) -> None:
    class Breaks(transformers.TrainerCallback):  # type: ignore[misc]
        def state(self) -> dict[str, Any]:
            if trainer.state.global_step >= 4:
                raise RuntimeError("no state")
            return {"args": {}, "attributes": {}}

    trainer = trainer_of(transformers, tmp_path / "course")
    trainer.add_callback(Breaks())
    kept = keep_in_memory(trainer, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 10
    assert kept.checkpointer is not None
    assert kept.checkpointer.counts["skipped"] >= 7


def test_a_checkpoint_to_resume_from_is_refused(transformers: Any, tmp_path: Path) -> None:
    trainer = trainer_of(transformers, tmp_path / "course", save_strategy="steps", save_steps=5)
    trainer.train()
    keep_in_memory(trainer, tmp_path)
    with pytest.raises(ValueError, match=r"train\(resume_from_checkpoint=.*checkpoint-5'\) and checkpoints in memory"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-5"))


def test_looking_for_a_batch_size_is_refused(transformers: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size=True begins training anew"):
        keep_in_memory(trainer_of(transformers, tmp_path / "course", auto_find_batch_size=True), tmp_path)


def test_a_trainer_that_shards_in_a_way_of_its_own_is_refused(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = importlib.import_module("accelerate").DistributedType.DEEPSPEED
    trainer = trainer_of(transformers, tmp_path / "course")
    monkeypatch.setitem(trainer.accelerator.state.__dict__, "distributed_type", kind)
    with pytest.raises(TypeError, match="know one process, DDP and FSDP 2, and not DEEPSPEED"):
        keep_in_memory(trainer, tmp_path)


def test_another_trainer_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    class Other:
        def _run_epoch(self, epoch: int) -> None:
            pass

    with pytest.raises(TypeError, match=r"Other\._run_epoch does not take epochs_trained, num_update_steps_per_epoch"):
        keep_in_memory(Other(), tmp_path)


def test_the_module_imports_no_transformers() -> None:
    program = "import sys; import eagle_eye.checkpoint.callback_transformers; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
