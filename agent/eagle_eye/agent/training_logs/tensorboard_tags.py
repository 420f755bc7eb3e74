"""The frameworks' names for their TensorBoard scalars, as a table. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.agent.training_logs.reading import STEP_MAX, LineWriter, LogReading
from eagle_eye.agent.training_logs.tensorboard_events import Scalar


class Tag(NamedTuple):
    """A tag's meaning: a field of LogReading, its multiplier, and which rank by convention writes it."""

    field: str
    scale: float = 1.0
    writer: LineWriter = LineWriter.FIRST


# Exact names, in lower case. Missing here: tags whose step counts samples or tokens, or that follow no standard.
TAGS = MappingProxyType(
    {
        "lm loss": Tag("loss", writer=LineWriter.LAST),  # Megatron-LM
        "lm-loss-training/lm loss": Tag("loss", writer=LineWriter.LAST),  # Megatron-DeepSpeed
        "grad-norm": Tag("grad_norm", writer=LineWriter.LAST),
        "grad-norm/grad-norm": Tag("grad_norm", writer=LineWriter.LAST),
        "iteration-time": Tag("step_s", writer=LineWriter.LAST),
        "iteration-time/iteration-time": Tag("step_s", writer=LineWriter.LAST),
        "loss_metrics/global_avg_loss": Tag("loss"),  # torchtitan
        "training_metrics/grad_norm": Tag("grad_norm"),
        "time_metrics/end_to_end(s)": Tag("step_s"),
        "throughput(tps)": Tag("tokens_per_second"),
        "train/loss": Tag("loss"),  # Hugging Face
        "train/grad_norm": Tag("grad_norm"),
        "reduced_train_loss": Tag("loss"),  # NeMo
        "train_step_timing in s": Tag("step_s"),
        "train_loss": Tag("loss"),  # Lightning modules
        "train_loss_step": Tag("loss"),
        "loss": Tag("loss"),
        "grad_norm": Tag("grad_norm"),
        "lm_loss": Tag("loss"),  # nanotron
        "time_per_iteration_ms": Tag("step_s", 1e-3),
        "elapsed_time_per_iteration_ms": Tag("step_s", 1e-3),
        "tokens_per_sec_per_gpu": Tag("tokens_per_second"),
        "tokens_per_sec": Tag("job_tokens_per_second"),
        "loss/train/total": Tag("loss"),  # Composer
        "l2_norm/grad/global": Tag("grad_norm"),
        "throughput/device/tokens_per_sec": Tag("tokens_per_second"),
        "throughput/tokens_per_sec": Tag("job_tokens_per_second"),
    }
)


def reading(scalar: Scalar) -> LogReading | None:
    """Convert the scalar to a reading, None where its tag is not in the table."""
    tag = TAGS.get(scalar.tag.lower())
    if tag is None or not 0 <= scalar.step < STEP_MAX:
        return None
    value = {tag.field: scalar.value * tag.scale}
    return LogReading(step=scalar.step, stamp_s=scalar.time_s, writer=tag.writer, **value)  # type: ignore[arg-type]
