from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from tests.agent import two_ranks  # noqa: E402
from tests.agent.fakes import Listener  # noqa: E402
from tests.agent.hearing import Hearing  # noqa: E402

# The trainer warns of much in a small test: of pinned memory, of what is deprecated next.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 8


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    hearing = Hearing(tmp_path / "hook.sock")
    yield hearing
    hearing.close()


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def model_of(*, broken_from: int | None = None) -> Any:
    """A model whose n-th training batch has the loss n, and NaN from ``broken_from`` on."""

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.calls = 0

        def forward(self, x: Any, input_ids: Any = None, labels: Any = None) -> Any:
            loss = self.net(x).mean() * 0.0
            if self.training:
                loss = loss + float("nan" if self.calls == broken_from else self.calls)
                self.calls += 1
            return {"loss": loss, "logits": self.net(x)}

    return Model()


def rows(count: int = 2 * STEPS) -> list[dict[str, Any]]:
    return [
        {"x": torch.ones(4), "input_ids": torch.ones(5, dtype=torch.int64), "labels": torch.ones(1)}
        for _ in range(count)
    ]


def trainer_of(transformers: Any, folder: Path, listener_path: Path, model: Any, **options: Any) -> Any:
    from eagle_eye.agent.hook_transformers import EagleEyeCallback

    callback = EagleEyeCallback(socket=listener_path)
    assert isinstance(callback, transformers.TrainerCallback)
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
    }
    args = transformers.TrainingArguments(**{**defaults, **options})
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows(), eval_dataset=rows(4), callbacks=[callback]
    )
    trainer.eagle_eye = callback
    return trainer


def test_each_step_is_reported_with_this_ranks_loss_and_tokens(
    transformers: Any, listener: Listener, tmp_path: Path
) -> None:
    trainer = trainer_of(transformers, tmp_path, listener.path, model_of())
    trainer.train()
    last = listener.read_last()
    assert last.goodbye
    assert (last.step, last.totals.steps, last.failures, trainer.eagle_eye.report.failures) == (STEPS, STEPS, 0, 0)
    assert (last.totals.losses, last.totals.loss) == (STEPS, sum(range(STEPS)))
    assert last.totals.timed_tokens == 10.0 * last.totals.token_steps > 0.0
    assert last.totals.grad_norms == STEPS // 2 - 1  # with the step after each log
    assert last.totals.compute_steps == STEPS
    assert not trainer.model._forward_hooks


def test_accumulated_batches_are_one_step_with_their_mean_loss(
    transformers: Any, listener: Listener, tmp_path: Path
) -> None:
    trainer_of(transformers, tmp_path, listener.path, model_of(), gradient_accumulation_steps=4).train()
    last = listener.read_last()
    assert (last.step, last.totals.steps, last.totals.losses) == (2, 2.0, 2.0)
    assert last.totals.loss == pytest.approx(1.5 + 5.5)
    assert last.totals.timed_tokens == 40.0 * last.totals.token_steps


def test_a_loss_that_the_trainers_log_hides_is_counted(transformers: Any, listener: Listener, tmp_path: Path) -> None:
    trainer_of(transformers, tmp_path, listener.path, model_of(broken_from=3)).train()
    assert listener.read_last().totals.loss_odd == 1.0


def test_without_a_loss_of_the_models_own_the_logs_counts(
    transformers: Any, listener: Listener, tmp_path: Path
) -> None:
    class WithoutLoss(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return {"logits": self.net(x)}

    trainer = trainer_of(transformers, tmp_path, listener.path, WithoutLoss(), remove_unused_columns=False)
    trainer.compute_loss = lambda model, inputs, **_: model(inputs["x"])["logits"].mean() * 0.0 + 4.0
    trainer.train()
    totals = listener.read_last().totals
    assert (totals.losses, totals.loss) == (STEPS // 2 - 1, 4.0 * (STEPS // 2 - 1))


def phases(listener: Listener) -> list[Any]:
    events = {event.number: event for message in listener.read() for event in message.events}
    return [event.value if event.kind == "phase" else event.kind for _, event in sorted(events.items())]


def test_evaluations_and_checkpoints_are_phases(transformers: Any, listener: Listener, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = trainer_of(transformers, tmp_path, listener.path, model_of(), **options)
    trainer.train()
    round_ = ["eval", "train", "checkpoint", "checkpoint_begin", "checkpoint_end", "train"]
    assert phases(listener) == ["start", "train", *round_, *round_]
    assert trainer.eagle_eye.report.failures == 0


def test_steps_go_on_where_a_checkpoint_left_off(transformers: Any, listener: Listener, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer_of(transformers, tmp_path, listener.path, model_of(), **options).train()
    before = listener.read_last()
    trainer_of(transformers, tmp_path, listener.path, model_of(), **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    messages = listener.read()
    assert messages[0].step == 4
    assert (messages[-1].step, messages[-1].totals.steps) == (STEPS, STEPS - 4)
    assert before.process not in {message.process for message in messages}


def test_an_evaluation_outside_training_reports_nothing(transformers: Any, listener: Listener, tmp_path: Path) -> None:
    trainer_of(transformers, tmp_path, listener.path, model_of()).evaluate()
    assert listener.read() == []


def test_a_failing_callback_does_not_stop_training(
    transformers: Any, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(transformers, tmp_path, listener.path, model_of())
    monkeypatch.setattr(trainer.eagle_eye, "_mean_loss", lambda: 1 // 0)
    trainer.train()
    assert trainer.state.global_step == trainer.eagle_eye.report.failures == STEPS


@pytest.mark.slow
def test_two_ranks_report_their_own_losses_and_waits(transformers: Any, listener: Listener, tmp_path: Path) -> None:
    job = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from pathlib import Path
        import transformers
        import transformers.trainer
        from tests.agent import test_hook_transformers as shared, two_ranks

        def train():
            model = shared.model_of()
            model.calls = 100 * int(os.environ["RANK"])
            trainer = shared.trainer_of(
                transformers, Path(sys.argv[2]), Path(sys.argv[1]), model, gradient_accumulation_steps=2
            )
            trainer.train()
            assert trainer.eagle_eye.report.failures == 0

        two_ranks.run(train)
        """
    done = two_ranks.job(job, str(listener.path), str(tmp_path))
    assert done.returncode == 0, done.stderr
    last = {message.rank: message for message in listener.read()}
    assert set(last) == {0, 1}
    for rank, message in last.items():
        assert (message.step, message.totals.steps, message.totals.losses) == (2, 2.0, 2.0)
        assert message.totals.loss == pytest.approx(200.0 * rank + 0.5 + 2.5)
        assert message.totals.compute_steps == message.totals.collective_steps == 2.0


def test_without_transformers_the_module_imports_and_the_class_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None;"
        "import eagle_eye.agent.hook_transformers as module\n"
        "try: module.EagleEyeCallback\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install transformers" in done.stdout
