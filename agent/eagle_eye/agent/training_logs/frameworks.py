"""Formats of frameworks' training logs, and detection of a log's framework. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from eagle_eye.agent.training_logs.general import GENERAL
from eagle_eye.agent.training_logs.hugging_face import HUGGING_FACE
from eagle_eye.agent.training_logs.lightning_csv import LIGHTNING_CSV
from eagle_eye.agent.training_logs.line_patterns import (
    FAIRSEQ,
    LITGPT,
    MAXTEXT,
    NANOGPT,
    NEMO_RL,
    SITE,
    VERL,
    site_framework,
)
from eagle_eye.agent.training_logs.mllog import MLLOG
from eagle_eye.agent.training_logs.reading import (
    NUMBER,
    STEP_MAX,
    Framework,
    LineWriter,
    LogReading,
    Parse,
    Quiet,
    bar,
    decoded,
    first_number,
    number,
    pairs,
    stamp_s,
)

# Megatron-LM and its forks (Megatron-DeepSpeed and others): one line of ``key: value |`` per interval.
#
# Since 2021 the highest rank writes this line, and rank 0 the lines about checkpoints. Values are means over the
# interval.
_ELAPSED = "elapsed time per iteration ("
_ITERATION = re.compile(r"\biteration:? {0,12}([0-9]{1,12}) {0,4}/ {0,12}[0-9]{1,12} {0,4}\|")
_SAVING = re.compile(r"^\s{0,8}saving checkpoint at iteration {1,12}([0-9]{1,12}) to ")
_SAVED = re.compile(r"\bsuccessfully saved checkpoint from iteration {1,12}([0-9]{1,12}) to ")
_LOSS = ("lm loss", "loss", "total loss")
_TOKENS = ("tokens per gpu per second (tgs)", "throughput (token/sec/gpu)", "tokens/sec/gpu")


def parse_megatron(line: str) -> LogReading | None:
    """Parse the line; return None when it is not Megatron's."""
    if _ELAPSED in line:
        return _iteration(line)
    if found := _SAVED.search(line):
        return LogReading(quiet=Quiet.CHECKPOINT_END, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    if found := _SAVING.match(line):
        return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    return None


def _iteration(line: str) -> LogReading | None:
    found = _ITERATION.search(line)
    if found is None:
        return None
    fields = pairs(line)
    step_ms = first_number(fields, ("elapsed time per iteration (ms)",))
    step_s = first_number(fields, ("elapsed time per iteration (s)",)) if step_ms is None else step_ms / 1e3
    loss = first_number(fields, _LOSS)
    if first_number(fields, ("number of nan iterations",)):
        loss = math.nan  # the printed mean excludes these
    return LogReading(
        step=int(found[1]),
        step_s=step_s,
        loss=loss,
        grad_norm=first_number(fields, ("grad norm",)),
        tokens_per_second=first_number(fields, _TOKENS),
        writer=LineWriter.LAST,
    )


MEGATRON = Framework(
    "megatron",
    (_ELAPSED.encode(), b"saving checkpoint at iteration", b"saved checkpoint from iteration"),
    lambda: parse_megatron,
)


# nanotron: one line of ``key: value |`` per step, with K, M and B suffixes.
_NANOTRON_ITERATION = re.compile(r"\biteration: ([0-9]{1,12}) / [0-9]{1,12} \|")
_STAGE = re.compile(r"\|PP=[1-9]")
_STEP_MS = ("time_per_iteration_ms", "elapsed_time_per_iteration_ms")


def parse_nanotron(line: str) -> LogReading | None:
    """Parse the line; return None when it is not nanotron's.

    The first rank of the last pipeline stage writes it: rank 0, unless the line names a later stage.
    """
    found = _NANOTRON_ITERATION.search(line)
    if found is None:
        return None
    fields = pairs(line[found.start() :])
    step_ms = first_number(fields, _STEP_MS)
    return LogReading(
        step=int(found[1]),
        step_s=None if step_ms is None else step_ms / 1e3,
        loss=first_number(fields, ("lm_loss", "loss")),
        grad_norm=first_number(fields, ("grad_norm",)),
        tokens_per_second=first_number(fields, ("tokens_per_sec_per_gpu",)),
        job_tokens_per_second=first_number(fields, ("tokens_per_sec",)),
        writer=LineWriter.ANY if _STAGE.search(line, 0, found.start()) else LineWriter.FIRST,
    )


NANOTRON = Framework("nanotron", (b" iteration: ",), lambda: parse_nanotron)


# NeMo and Lightning: NeMo's line of ``key: value |``, and Lightning's progress bar with the module's values.
#
# Lightning's bar counts batches, several of which may make a step, from 0 in each epoch: a step is read only where the
# bar names the global one.
_LINE = re.compile(r"\bTraining epoch [0-9]{1,9}, iteration ([0-9]{1,12})/[0-9]{1,12} \|")
_EPOCH = re.compile(r"Epoch [0-9]{1,9}\s{0,2}:?")
_NEMO_LOSS = ("reduced_train_loss", "train_loss", "train_loss_step", "train/loss", "loss")
_GRAD_NORM = ("grad_norm", "train/grad_norm", "gradient_norm")
_STEP_S = ("train_step_timing in s",)


def parse_nemo(line: str) -> LogReading | None:
    """Parse the line; return None when it is not NeMo's or Lightning's."""
    if found := _LINE.search(line):
        return _reading(pairs(line), int(found[1]))
    if not line.startswith("Epoch "):
        return None
    seen = bar(line)
    if seen is None or _EPOCH.fullmatch(seen.label) is None or seen.done == 0:
        return None
    return _reading(seen.postfix, None)


def _reading(fields: dict[str, str], step: int | None) -> LogReading:
    """Return the fields as a reading; ``step`` is for lines that do not name the global one."""
    named = first_number(fields, ("global_step", "trainer/global_step"))
    if named is not None and 0 <= named < STEP_MAX:
        step = int(named)
    return LogReading(
        step=step,
        step_s=first_number(fields, _STEP_S),
        loss=first_number(fields, _NEMO_LOSS),
        grad_norm=first_number(fields, _GRAD_NORM),
        writer=LineWriter.FIRST,
    )


NEMO = Framework("nemo", (b"Training epoch ", b"Epoch "), lambda: parse_nemo)


# OLMo and OLMo-core: a line with the step, then one indented ``name=value`` per line.
_STEP = re.compile(r"(?:^|[\s\]])\[step=([0-9]{1,12})/[0-9?]{1,12}, ?epoch=")
_VALUE = re.compile(rf"^\s{{1,8}}([A-Za-z][\w/ .-]{{1,80}})=({NUMBER})\s{{0,8}}$")


def parse_olmo(line: str) -> LogReading | None:
    """Parse the line; return None when it is not OLMo's."""
    if found := _STEP.search(line, 0, 400):
        return LogReading(step=int(found[1]), stamp_s=stamp_s(line), writer=LineWriter.FIRST)
    found = _VALUE.match(line)
    value = number(found[2]) if found is not None else None
    if found is None or value is None:
        return None
    name = found[1]
    if name in ("train/CrossEntropyLoss", "train/CE loss"):
        return LogReading(loss=value, writer=LineWriter.FIRST)
    if name in ("optim/total_grad_norm", "optim/total grad norm"):
        return LogReading(grad_norm=value, writer=LineWriter.FIRST)
    if name in ("throughput/device/tokens_per_second", "throughput/device/TPS"):
        return LogReading(tokens_per_second=value, writer=LineWriter.FIRST)
    if name in ("throughput/device/batches_per_second", "throughput/device/BPS") and value > 0.0:
        return LogReading(step_s=1.0 / value, writer=LineWriter.FIRST)
    return None


OLMO = Framework(
    "olmo",
    (
        b"[step=",
        b"train/CrossEntropyLoss=",
        b"train/CE loss=",
        b"optim/total",
        b"throughput/device/",
    ),
    lambda: parse_olmo,
)


# torchtitan: its text line, and its structured JSON lines, one file per rank.
NO_LOSS = -1.0  # printed by pipeline stages without a loss

_TITAN_STEP = re.compile(r"(?:^|[^\w ] |INFO - )(?:epoch: {0,8}[0-9]{1,9} )?step: {0,12}([0-9]{1,12}) ")
_FIELD = re.compile(rf"\b(loss|grad_norm|step_time|tps): {{0,12}}({NUMBER})s?(?=\s|$)")


class _Record(msgspec.Struct):
    """The fields of a structured line that are used."""

    log_type_name: str
    rank: int
    time_us: int
    source: str = ""
    step: int | None = None


_decoder = msgspec.json.Decoder(_Record)


class TorchtitanLogParser:
    """Parses the lines of one log.

    The structured lines carry the rank's current step: it has finished one when the next appears.
    """

    def __init__(self) -> None:
        self._at: dict[int, int] = {}

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not torchtitan's."""
        if line.startswith("{"):
            return self._structured(line)
        if " tps: " in line:
            return _text(line)
        if "Saving the checkpoint" in line or "Saving a full checkpoint" in line:
            return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, writer=LineWriter.FIRST)
        if "Finished saving the checkpoint" in line:
            return LogReading(quiet=Quiet.CHECKPOINT_END, writer=LineWriter.FIRST)
        return None

    def _structured(self, line: str) -> LogReading | None:
        record = decoded(line, _decoder)
        if record is None:
            return None
        step, rank = record.step, record.rank
        # Reinforcement learning actors have their own rank numbers.
        if step is None or not 0 <= step < STEP_MAX or rank < 0 or not record.source.startswith("train"):
            return None
        before = self._at.get(rank)
        if before is None and len(self._at) >= RANKS_IN_A_FILE_MAX:
            return None
        self._at[rank] = step
        if before is None or step <= before:
            return None
        return LogReading(step=step - 1, stamp_s=record.time_us / 1e6, rank=rank)


RANKS_IN_A_FILE_MAX = 64  # torchtitan writes one file per rank; merged ones hold a node's


def _text(line: str) -> LogReading | None:
    found = _TITAN_STEP.search(line)
    if found is None or "validate" in line:
        return None
    fields = {name: number(value) for name, value in _FIELD.findall(line, found.end())}
    if "loss" not in fields:
        return None
    return LogReading(
        step=int(found[1]),
        step_s=fields.get("step_time"),
        loss=None if fields["loss"] == NO_LOSS else fields["loss"],
        grad_norm=fields.get("grad_norm"),
        tokens_per_second=fields.get("tps"),
        stamp_s=stamp_s(line),
        writer=LineWriter.FIRST,
    )


def _parser() -> Parse:
    return TorchtitanLogParser()


TORCHTITAN = Framework(
    "torchtitan", (b"tps: ", b"aving the checkpoint", b"Saving a full ", b'"log_type_name"'), _parser
)


# DeepSpeed's own lines, under any trainer: steps, and with its pipeline engine the loss.
_HINTS = ("] step=", "/global_step=", "iter time (s): ", " is about to be saved!", " is ready now!")
_DEEPSPEED_STEP = re.compile(r"\[Rank ([0-9]{1,7})\] step=([0-9]{1,12}), skipped=")
_TIMER = re.compile(r"/global_step=([0-9]{1,12}), RunningAvgSamplesPerSec=")
_PIPELINE = re.compile(rf"\bsteps: ([0-9]{{1,12}}) loss: ({NUMBER}) .{{0,400}}?iter time \(s\): ({NUMBER}) ")
_TAG = re.compile(r"Checkpoint (?:global_step)?([0-9]{1,12}) is (about to be saved|ready now)!")


def parse_deepspeed(line: str) -> LogReading | None:
    """Parse the line; return None when it is not DeepSpeed's."""
    if not any(hint in line for hint in _HINTS):
        return None
    if found := _DEEPSPEED_STEP.search(line):
        return LogReading(step=int(found[2]), stamp_s=stamp_s(line), rank=int(found[1]))
    if found := _TIMER.search(line):
        return LogReading(step=int(found[1]), stamp_s=stamp_s(line), writer=LineWriter.FIRST)
    if found := _PIPELINE.search(line):
        return LogReading(step=int(found[1]), loss=number(found[2]), step_s=number(found[3]), writer=LineWriter.FIRST)
    if found := _TAG.search(line):
        quiet = Quiet.CHECKPOINT_END if found[2].startswith("ready") else Quiet.CHECKPOINT_BEGIN
        return LogReading(quiet=quiet, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    return None


DEEPSPEED = Framework(
    "deepspeed",
    tuple(hint.encode() for hint in _HINTS),
    lambda: parse_deepspeed,
    engine=True,
)


# Composer and LLM Foundry: a line with the batch, then one indented line per value.
_BATCH = re.compile(r"^(?:\[epoch=([0-9]{1,9})(?:/[0-9]{1,9})?\])?\[batch=([0-9]{1,12})(?:/([0-9]{1,12}))?\]:?\s{0,8}$")
_COMPOSER_VALUE = re.compile(rf"^\s{{1,8}}Train ([a-z0-9_/]{{1,80}}): {{1,4}}({NUMBER})\s{{0,8}}$")


def parse_composer(line: str) -> LogReading | None:
    """Parse the line; return None when it is not Composer's."""
    if found := _BATCH.match(line):
        return LogReading(step=_step(found[1], int(found[2]), found[3]), writer=LineWriter.FIRST)
    found = _COMPOSER_VALUE.match(line)
    value = number(found[2]) if found is not None else None
    if found is None or value is None:
        return None
    name = found[1]
    if name == "loss/train/total":
        return LogReading(loss=value, writer=LineWriter.FIRST)
    if name == "l2_norm/grad/global":
        return LogReading(grad_norm=value, writer=LineWriter.FIRST)
    if name == "throughput/device/tokens_per_sec":
        return LogReading(tokens_per_second=value, writer=LineWriter.FIRST)
    if name == "throughput/batches_per_sec" and value > 0.0:
        return LogReading(step_s=1.0 / value, writer=LineWriter.FIRST)
    return None


def _step(epoch: str | None, batch: int, batches: str | None) -> int | None:
    """Return the step; None where the number of batches in earlier epochs is unknown."""
    if epoch is None or int(epoch) <= 1:
        return batch
    return (int(epoch) - 1) * int(batches) + batch if batches else None


COMPOSER = Framework(
    "composer",
    (b"[batch=", b"Train loss/train/total", b"Train throughput/", b"Train l2_norm/grad/global"),
    lambda: parse_composer,
)


# In the order in which they are tried on a log whose framework is not known yet.
FRAMEWORKS: tuple[Framework, ...] = (
    MEGATRON,
    TORCHTITAN,
    MLLOG,
    HUGGING_FACE,
    NEMO,
    NANOTRON,
    COMPOSER,
    OLMO,
    MAXTEXT,
    NANOGPT,
    LITGPT,
    FAIRSEQ,
    VERL,
    NEMO_RL,
    LIGHTNING_CSV,
    DEEPSPEED,
    GENERAL,
)


def expected(framework: str = "", site_patterns: Sequence[str] = ()) -> tuple[Framework, ...]:
    """Return the frameworks to parse: the named one, empty: all; a site's own patterns come first.

    Libraries below a framework are parsed in addition. Raises BadLinePattern for an invalid pattern.
    """
    known = (site_framework(site_patterns), *FRAMEWORKS) if site_patterns else FRAMEWORKS
    return tuple(item for item in known if not framework or item.engine or item.name in (framework, SITE))


class LogParser:
    """Parses the lines of one log; the first recognized line determines its framework.

    A library below (DeepSpeed) does not determine it: its lines are parsed in addition to the framework's. Nor does the
    general parser, which is dropped once a framework is recognised. ``framework`` is its name, "" until known;
    ``needles`` are substrings of lines worth parsing.
    """

    def __init__(self, frameworks: Sequence[Framework] = FRAMEWORKS) -> None:
        """``frameworks`` are tried in order."""
        self.framework = ""
        self._parsers = [(item, item.parser()) for item in frameworks]
        self.needles = tuple(needle for item in frameworks for needle in item.needles)

    def parse(self, text: str) -> LogReading | None:
        """Parse a line without prefixes; return None when it is no framework's."""
        for framework, parse in self._parsers:
            reading = parse(text)
            if reading is not None:
                if not (framework.engine or framework.general or self.framework):
                    self._keep(framework)
                return reading
        return None

    def _keep(self, framework: Framework) -> None:
        self.framework = framework.name
        self._parsers = [item for item in self._parsers if item[0].engine or item[0] is framework]
        self.needles = tuple(
            needle for known, _ in self._parsers for needle in known.needles_once_known or known.needles
        )
