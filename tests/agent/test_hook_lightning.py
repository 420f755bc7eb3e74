from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

import torch

from tests.agent import two_ranks
from tests.agent.fakes import Listener
from tests.agent.hearing import Hearing

# Lightning warns of much in a small test: of few workers, of no logger.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = 8


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    hearing = Hearing(tmp_path / "hook.sock")
    yield hearing
    hearing.close()


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(
        request.param,
        reason=f"{request.param} is not installed: pip install {request.param.partition('.')[0].replace('_', '-')}",
    )


@pytest.fixture
def callback_class(lightning: Any) -> Any:
    from eagle_eye.agent import hook_lightning

    vars(hook_lightning).pop("EagleEyeCallback", None)  # made anew for this Lightning
    made = hook_lightning.EagleEyeCallback
    assert issubclass(made, lightning.Callback)
    return made


def module_of(lightning: Any, **behaviour: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.last_norm: float | None = None

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == behaviour.get("fails_at"):
                raise RuntimeError("the data is broken")
            return self(batch["x"]).mean() * 0.0 + float(batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["x"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_before_optimizer_step(self, _optimizer: Any) -> None:
            self.last_norm = 3.0

    return Module()


def loader() -> Any:
    rows = [{"x": torch.ones(4), "input_ids": torch.ones(5, dtype=torch.int64)} for _ in range(2 * BATCHES)]
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def trainer_of(lightning: Any, folder: Path, callback: Any, **options: Any) -> Any:
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(callbacks=[callback], **{**defaults, **options})


def test_each_step_is_reported_with_loss_and_tokens(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path, grad_norm=lambda module: module.last_norm)
    trainer_of(lightning, tmp_path, callback).fit(module_of(lightning), loader())
    last = listener.read_last()
    assert last.goodbye
    assert (last.step, last.totals.steps, last.failures, callback.report.failures) == (BATCHES, BATCHES, 0, 0)
    assert (last.totals.losses, last.totals.loss) == (BATCHES, sum(range(BATCHES)))
    assert last.totals.timed_tokens == 10.0 * last.totals.token_steps > 0.0
    assert (last.totals.grad_norms, last.totals.grad_norm) == (BATCHES, 3.0 * BATCHES)
    assert last.totals.compute_steps == last.totals.data_wait_steps + 1 == BATCHES


def test_accumulated_batches_are_one_step_with_their_mean_loss(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path)
    trainer_of(lightning, tmp_path, callback, accumulate_grad_batches=4).fit(module_of(lightning), loader())
    last = listener.read_last()
    assert (last.step, last.totals.steps, last.totals.losses) == (2, 2.0, 2.0)
    assert last.totals.loss == pytest.approx(1.5 + 5.5)
    assert last.totals.timed_tokens == 40.0 * last.totals.token_steps


def test_steps_go_on_where_a_checkpoint_left_off_and_a_second_fit_is_a_second_report(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path)
    first = trainer_of(lightning, tmp_path, callback)
    first.fit(module_of(lightning), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    before = listener.read_last()
    second = trainer_of(lightning, tmp_path, callback, max_epochs=2)
    second.fit(module_of(lightning), loader(), ckpt_path=tmp_path / "a.ckpt")
    messages = listener.read()
    assert messages[0].step == BATCHES
    assert messages[-1].step == 2 * BATCHES
    assert messages[-1].totals.steps == BATCHES
    assert {message.process for message in messages} != {before.process}


def phases(listener: Listener) -> list[Any]:
    events = {event.number: event for message in listener.read() for event in message.events}
    return [event.value if event.kind == "phase" else event.kind for _, event in sorted(events.items())]


def test_validation_and_checkpoints_are_phases(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path)
    keeper = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4)
    trainer = trainer_of(lightning, tmp_path, callback, enable_checkpointing=True, val_check_interval=6)
    trainer.callbacks.append(keeper)
    trainer.fit(module_of(lightning), loader(), loader())
    reported = phases(listener)
    assert reported[:2] == ["start", "train"]
    assert reported[2:6] == ["checkpoint", "checkpoint_begin", "checkpoint_end", "train"]
    assert "eval" in reported
    assert reported.count("checkpoint_begin") == reported.count("checkpoint_end") >= 2
    assert callback.report.failures == 0


def test_what_ends_training_is_reported_once_and_raised(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path)
    with pytest.raises(RuntimeError, match="the data is broken"):
        trainer_of(lightning, tmp_path, callback).fit(module_of(lightning, fails_at=3), loader())
    messages = listener.read()
    errors = {event.number: str(event.value) for each in messages for event in each.events if "error" in event.kind}
    assert len(errors) == 1
    assert "RuntimeError: the data is broken" in next(iter(errors.values()))
    assert messages[-1].goodbye
    assert messages[-1].step == 3


def test_a_failing_callback_does_not_stop_training(
    lightning: Any, callback_class: Any, listener: Listener, tmp_path: Path
) -> None:
    callback = callback_class(socket=listener.path, tokens=lambda _batch: 1 // 0)
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module_of(lightning), loader())
    assert trainer.global_step == callback.report.failures == BATCHES


def test_a_callback_travels_to_spawned_processes(callback_class: Any, listener: Listener) -> None:
    callback = callback_class(socket=listener.path)
    callback.report.begin(None, None, 0)
    copied = pickle.loads(pickle.dumps(callback))
    assert copied.report.training is None
    callback.report.end()


@pytest.mark.slow
def test_two_ranks_report_their_own_steps_and_waits(lightning: Any, listener: Listener, tmp_path: Path) -> None:
    job = f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import {lightning.__name__} as lightning
        from pathlib import Path
        from eagle_eye.agent.hook_lightning import EagleEyeCallback
        from tests.agent import test_hook_lightning as shared, two_ranks

        def train():
            callback = EagleEyeCallback(socket=sys.argv[1])
            trainer = shared.trainer_of(
                lightning, Path(sys.argv[2]), callback, devices=2, strategy="ddp", accumulate_grad_batches=2
            )
            trainer.fit(shared.module_of(lightning), shared.loader())
            assert callback.report.failures == 0

        two_ranks.run(train)
        """
    done = two_ranks.job(job, str(listener.path), str(tmp_path))
    assert done.returncode == 0, done.stderr
    last = {message.rank: message for message in listener.read()}
    assert set(last) == {0, 1}
    for message in last.values():
        assert message.goodbye
        assert (message.step, message.totals.steps, message.world_size) == (2, 2.0, 2)
        assert message.totals.compute_steps == message.totals.collective_steps == 2.0


def test_without_lightning_the_module_imports_and_the_class_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules.update({'lightning': None, 'lightning.pytorch': None, 'pytorch_lightning': None});"
        "import eagle_eye.agent.hook_lightning as module\n"
        "try: module.EagleEyeCallback\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install lightning" in done.stdout


def test_the_module_has_no_other_attributes() -> None:
    module = importlib.import_module("eagle_eye.agent.hook_lightning")
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = module.Other
