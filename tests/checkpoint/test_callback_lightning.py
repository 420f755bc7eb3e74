"""A fit by Lightning that is killed after a step goes on as if nobody had killed it, batch by batch and bit by bit."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[checkpoint]")

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.checkpoint.job import state_number
from eagle_eye.checkpoint.store import ask_status
from tests.agent import two_ranks
from tests.checkpoint import kept_training
from tests.checkpoint.kept_training import Course, Killed, abandon, course, until_whole
from tests.checkpoint.stores import Node, until

# Lightning warns of much in a small test: of few workers, of no logger, of loaders that cannot be resumed.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, FEATURES = 10, 4
node = kept_training.node


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    return imported(request.param)


@pytest.fixture
def one_lightning() -> Any:
    """Where both would do the same."""
    return imported("lightning.pytorch")


def imported(package: str) -> Any:
    name = package.partition(".")[0].replace("_", "-")
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install {name}")


def callback_class(lightning: Any) -> Any:
    from eagle_eye.checkpoint import callback_lightning

    vars(callback_lightning).pop("MemoryCheckpointCallback", None)  # made anew for this Lightning
    made = callback_lightning.MemoryCheckpointCallback
    assert issubclass(made, lightning.Callback)
    return made


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), float(index))


class NoisyRows(Rows):
    """Each row is read with noise, of which every batch that is read takes its part."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(FEATURES)


class Stream(IterableDataset[torch.Tensor]):
    """Rows of which nobody says how many there are."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.full((FEATURES,), float(index)) for index in range(ROWS))


class StatefulLoader:
    """Batches of two rows in an order that it draws itself; it says where it is."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._begun = self._generator.get_state()
        self._given, self._goes_on = 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._goes_on:
            self._begun, self._given = self._generator.get_state(), 0
        self._goes_on = False
        self._generator.set_state(self._begun)
        order = torch.randperm(ROWS, generator=self._generator).tolist()
        while self._given < ROWS // 2:
            self._given += 1
            rows = order[2 * self._given - 2 : 2 * self._given]
            yield torch.stack([torch.full((FEATURES,), float(index)) for index in rows])

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self._begun, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun, self._given = state["begun"], state["given"]
        self._goes_on = self._given < ROWS // 2
        if not self._goes_on:
            self._generator.set_state(self._begun)
            torch.randperm(ROWS, generator=self._generator)


class SizedStatefulLoader(StatefulLoader):
    def __len__(self) -> int:
        return ROWS // 2


def plain(dataset: Any = None, **options: Any) -> Any:
    return DataLoader(dataset if dataset is not None else Rows(), batch_size=2, **options)


def torchdata_loader(**options: Any) -> Any:
    reason = "torchdata is not installed: pip install torchdata"
    return pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader(
        Rows(), batch_size=2, shuffle=True, **options
    )


@dataclass
class Scenario:
    """A way to train."""

    loader: Callable[[], Any] = lambda: plain(shuffle=True)
    options: dict[str, Any] = field(default_factory=dict)
    validates: bool = False
    schedule: str = "step"  # or epoch, plateau
    optimizers: int = 1
    callbacks: Callable[[Any], list[Any]] = lambda _: []


def optimizers_of(module: Any, scenario: Scenario) -> Any:
    if scenario.optimizers > 1:
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (module.net[0], module.net[3])]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    if scenario.schedule == "plateau":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "measure"}}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": scenario.schedule}}


def rates_of(trainer: Any) -> list[float]:
    return [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


def stepped(module: Any, loss: Any) -> None:
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def module_of(lightning: Any, scenario: Scenario, say: Course) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
            self.automatic_optimization = scenario.optimizers == 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch).square().mean()
            say(
                step=self.trainer.global_step,
                epoch=self.trainer.current_epoch,
                batch=batch_idx,
                rows=batch[:, 0].tolist(),
                loss=loss.item(),
                rates=rates_of(self.trainer),
            )
            return loss if self.automatic_optimization else stepped(self, loss)

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return optimizers_of(self, scenario)

    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.rand(1)
            self.log("measure", self.net(batch).mean())

        def val_dataloader(self) -> Any:
            return plain()

        def on_validation_end(self) -> None:
            say(validated=self.trainer.global_step)

    return Validated() if scenario.validates else Module()


def pace_of(lightning: Any, kept: Any, end: Callable[[int], None]) -> Any:
    """Each step is whole before the next batch, and ``end`` hears of it."""

    class Pace(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            step = trainer.global_step
            if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
                until_whole(kept.checkpointer, step)
                end(step)

    return Pace()


def trained(
    lightning: Any,
    scenario: Scenario,
    path: Path,
    kept: Any = None,
    end: Callable[[int], None] = lambda _: None,
    file: Path | None = None,
    **options: Any,
) -> Any:
    """Return the trainer of a fit, whose course is written to the path."""
    torch.manual_seed(11)
    say = Course(path)
    module = module_of(lightning, scenario, say)
    callbacks = scenario.callbacks(lightning)
    if kept is not None:
        callbacks = [kept, pace_of(lightning, kept, end), *callbacks]
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": path.parent,
    }
    trainer = lightning.Trainer(callbacks=callbacks, **{**defaults, **scenario.options, **options})
    trainer.fit(module, scenario.loader(), ckpt_path=file)
    say(ended=trainer.global_step, number=state_number(module, trainer.optimizers[0]))
    return trainer


def killed_after(lightning: Any, scenario: Scenario, folder: Path, step: int) -> None:
    kept = callback_class(lightning)(folder)

    def end(done: int) -> None:
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        trained(lightning, scenario, folder / "killed", kept, end)
    abandon(kept.checkpointer)


def goes_on(lightning: Any, scenario: Scenario, folder: Path, step: int, undisturbed: list[dict[str, Any]]) -> None:
    """Killed after a step and begun again, everything is as it was without the kill, and without checkpoints."""
    folder.mkdir()
    killed_after(lightning, scenario, folder, step)
    kept = callback_class(lightning)(folder)
    trained(lightning, scenario, folder / "resumed", kept)
    resumed = course(folder / "resumed")
    assert resumed == undisturbed[-len(resumed) :]
    first = next(line for line in resumed if "step" in line)
    assert first["step"] == step
    assert kept.checkpointer.counts["skipped"] == 0


def kill_points(lines: list[dict[str, Any]]) -> list[int]:
    """Return steps after which to kill: two within the first epoch, its last, and the first of the next."""
    first = sorted({line["step"] for line in lines if line["epoch"] == 0 and line["step"]})
    second = sorted({line["step"] for line in lines if line["epoch"] == 1})
    return [*first[:2], *second[:2]]


SCENARIOS = {
    "shuffled": Scenario(),
    "scheduled by epoch": Scenario(schedule="epoch"),
    "noise in each row": Scenario(lambda: plain(NoisyRows(), shuffle=True)),
    "workers": Scenario(lambda: plain(NoisyRows(), shuffle=True, num_workers=1)),
    "accumulated": Scenario(options={"accumulate_grad_batches": 2}),
    "some batches of each epoch": Scenario(options={"limit_train_batches": 3}),
    "no length": Scenario(lambda: plain(Stream())),
    "validated": Scenario(validates=True),
    "by a measure": Scenario(validates=True, schedule="plateau"),
    "validated in between": Scenario(options={"val_check_interval": 2}, validates=True),
    "stops early": Scenario(
        validates=True,
        options={"max_epochs": 6},
        callbacks=lambda lightning: [lightning.callbacks.EarlyStopping("measure", patience=2, mode="max")],
    ),
    "stateful": Scenario(SizedStatefulLoader),
    "stateful without length": Scenario(StatefulLoader),
    "stateful, validated": Scenario(SizedStatefulLoader, validates=True),
    "torchdata": Scenario(torchdata_loader),
    "torchdata with a worker": Scenario(lambda: torchdata_loader(num_workers=1)),
    "two optimizers by hand": Scenario(optimizers=2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fit_goes_on_after_any_step_as_if_nobody_had_killed_it(
    one_lightning: Any, name: str, node: Node, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    trained(one_lightning, scenario, tmp_path / "undisturbed")
    undisturbed = course(tmp_path / "undisturbed")
    # In an epoch, at its end, and in the next one.
    for step in kill_points([line for line in undisturbed if "step" in line]):
        goes_on(one_lightning, scenario, tmp_path / f"killed-{step}", step, undisturbed)


def three_attempts(lightning: Any, scenario: Scenario, folder: Path, world: int, **options: Any) -> None:
    """An undisturbed fit, one whose processes are all killed after its fourth step, and one that goes on from there."""
    from tests.checkpoint import attempts

    def fit(name: str, *, keeps: bool = True, end: Callable[[int], None] = lambda _: None) -> list[int]:
        def train() -> None:
            kept = callback_class(lightning)(folder) if keeps else None
            trained(lightning, scenario, folder / f"{name}-{os.environ['RANK']}", kept, end, **options)

        return attempts.attempt(train, world)

    def kill(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    assert fit("undisturbed", keeps=False) == [0] * world
    assert fit("killed", end=kill) == [-signal.SIGKILL] * world
    assert fit("resumed") == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, "{}"),
        (2, "{'devices': 2, 'strategy': 'ddp'}"),
        (2, "{'devices': 2, 'strategy': lightning.strategies.ModelParallelStrategy(2, 1)}"),
    ],
    ids=["one process", "ddp", "fsdp2"],
)
def test_processes_that_are_killed_go_on_as_if_nobody_had_killed_them(
    one_lightning: Any, world: int, options: str, node: Node, tmp_path: Path
) -> None:
    job = f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import {one_lightning.__name__} as lightning
        from pathlib import Path
        from tests.checkpoint import test_callback_lightning as shared

        shared.three_attempts(lightning, shared.Scenario(validates=True), Path(sys.argv[1]), {world}, **{options})
        """
    done = two_ranks.job(job, str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(world):
        resumed = course(tmp_path / f"resumed-{rank}")
        assert resumed[0]["step"] == 4
        assert resumed == course(tmp_path / f"undisturbed-{rank}")[-len(resumed) :]


def test_steps_of_the_optimizer_are_captured_and_micro_batches_are_not(
    lightning: Any, node: Node, tmp_path: Path
) -> None:
    kept = callback_class(lightning)(tmp_path)
    trainer = trained(lightning, Scenario(options={"accumulate_grad_batches": 2}), tmp_path / "course", kept)
    assert trainer.global_step == kept.checkpointer.counts["captured"] == 6


def test_the_memory_is_freed_when_the_fit_has_ended(one_lightning: Any, node: Node, tmp_path: Path) -> None:
    trained(one_lightning, Scenario(), tmp_path / "course", callback_class(one_lightning)(tmp_path))
    until(lambda: not ask_status(node.folder), "the store knows no job any more")


def test_the_last_step_goes_to_the_directory_before_the_memory_is_freed(
    one_lightning: Any, node: Node, tmp_path: Path
) -> None:
    kept = callback_class(one_lightning)(tmp_path, persist_every=10)
    trained(one_lightning, Scenario(), tmp_path / "course", kept)
    assert (tmp_path / "step_10" / ".metadata").exists()


def test_what_cannot_be_kept_does_not_stop_training(one_lightning: Any, node: Node, tmp_path: Path) -> None:
    class Breaks(one_lightning.Callback):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            if kept.checkpointer is not None and kept.checkpointer.counts["captured"] >= 3:
                raise RuntimeError("no state")
            return {}

    kept = callback_class(one_lightning)(tmp_path)
    module = module_of(one_lightning, Scenario(), Course(tmp_path / "course"))
    trainer = one_lightning.Trainer(
        callbacks=[kept, Breaks()], accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, plain())
    assert trainer.global_step == 10
    assert kept.checkpointer.counts["captured"] == 3


def test_a_strategy_that_partitions_in_a_way_of_its_own_is_refused(one_lightning: Any, tmp_path: Path) -> None:
    class MegatronStrategy(one_lightning.strategies.SingleDeviceStrategy):  # type: ignore[misc]
        pass

    strategy = MegatronStrategy(device=torch.device("cpu"))
    with pytest.raises(
        TypeError, match="know SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, and not Megatr"
    ):
        trained(
            one_lightning, Scenario(), tmp_path / "course", callback_class(one_lightning)(tmp_path), strategy=strategy
        )


def test_a_file_to_load_is_refused(one_lightning: Any, node: Node, tmp_path: Path) -> None:
    trained(one_lightning, Scenario(), tmp_path / "course", max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    kept = callback_class(one_lightning)(tmp_path)
    with pytest.raises(ValueError, match=r"fit\(ckpt_path=.*a.ckpt'\) loads a file over what is restored from memory"):
        trained(one_lightning, Scenario(), tmp_path / "course", kept, file=tmp_path / "a.ckpt")
    abandon(kept.checkpointer)


def test_loaders_of_which_only_some_have_a_state_are_refused(one_lightning: Any, node: Node, tmp_path: Path) -> None:
    kept = callback_class(one_lightning)(tmp_path)
    scenario = Scenario(lambda: {"a": plain(), "b": SizedStatefulLoader()})
    with pytest.raises(TypeError, match="some data loaders have state_dict"):
        trained(one_lightning, scenario, tmp_path / "course", kept)
    abandon(kept.checkpointer)


def test_hooks_that_would_not_be_called_are_named(
    one_lightning: Any, node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Averages(one_lightning.Callback):  # type: ignore[misc]
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            pass

    scenario = Scenario(callbacks=lambda _: [Averages()])
    trained(one_lightning, scenario, tmp_path / "course", callback_class(one_lightning)(tmp_path))
    said = [record.getMessage() for record in caplog.records if "is not kept in memory" in record.getMessage()]
    assert [line.partition(" ")[0] for line in said] == ["Averages"]


def test_a_callback_travels_to_spawned_processes(one_lightning: Any, tmp_path: Path) -> None:
    kept = callback_class(one_lightning)(tmp_path, persist_every=5)
    kept.checkpointer = threading.Lock()  # which does not travel, as little as a checkpointer
    copied = pickle.loads(pickle.dumps(kept))
    assert copied.checkpointer is None
    assert copied._arguments == (tmp_path, 5)


def test_without_lightning_the_module_imports_and_the_class_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules.update({'lightning': None, 'lightning.pytorch': None, 'pytorch_lightning': None});"
        "import eagle_eye.checkpoint.callback_lightning as module\n"
        "try: module.MemoryCheckpointCallback\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install lightning" in done.stdout


def test_the_module_has_no_other_attributes() -> None:
    module = importlib.import_module("eagle_eye.checkpoint.callback_lightning")
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = module.Other
