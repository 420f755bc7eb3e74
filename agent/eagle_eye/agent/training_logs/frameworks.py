"""Formats of frameworks' training logs, and detection of a log's framework. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from eagle_eye.agent.training_logs.general import GENERAL
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
from eagle_eye.agent.training_logs.lines import (
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

# Hugging Face's Trainer and tools built on it: a dictionary every few steps, and a progress bar in between.
#
# The Trainer's dictionary lacks the step; the bar has it, and the dictionaries of tools built on it. Evaluation bars
# look the same: the training's is the one shown when a dictionary with a learning rate is logged, and another one
# between its states is an evaluation.
DICTIONARY_CHARS_MAX = 8_192  # of a dictionary: preference training prints some 30 values

_DICTIONARY_VALUE = re.compile(rf"'([A-Za-z_][\w/.() -]{{0,80}})': ('?)({NUMBER})(?:/{NUMBER})?\2(?=[,}}])")
_STEP_NAMES = ("global_step", "global_step/max_steps")
_TRAINER_LOGGED = re.compile(r"(?:\[[A-Z]{4,8}\|[^\]]{1,200}\][^{]{0,100} >> )?\{")
_TRAINER_LOSSES = (("loss", "learning_rate"), ("loss/policy_avg", "lr"))  # the second is TRL's PPO
_TRAINER_SAVING = re.compile(r"\bSaving model checkpoint to \S{0,1000}?(?:checkpoint-([0-9]{1,12}))?/?(?:\s|$)")


class HuggingFaceLogParser:
    """Parses the lines of one log, or of one process's two."""

    def __init__(self) -> None:
        self._total: int | None = None  # steps of the training bar; None: unknown
        self._shown: tuple[int, int] | None = None  # done, total of the newest bar without a label

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not the Trainer's."""
        if "it]" in line or "it/s" in line or "s/it" in line:
            return self._bar(line)
        if "'loss'" in line or "'eval_" in line or "'loss/policy_avg'" in line:
            return self._dictionary(line)
        if "***** Running Evaluation *****" in line:
            return LogReading(quiet=Quiet.EVAL_BEGIN, writer=LineWriter.FIRST)
        if found := _TRAINER_SAVING.search(line):
            step = int(found[1]) if found[1] else None
            return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, quiet_step=step, writer=LineWriter.FIRST)
        return None

    def _bar(self, line: str) -> LogReading | None:
        seen = bar(line)
        if seen is None or seen.label or seen.total is None:
            return None
        self._shown = seen.done, seen.total
        if self._total is None or seen.done == 0:
            return None
        if seen.total != self._total:  # an evaluation's is shown once more, whole, after its dictionary
            return LogReading(quiet=Quiet.EVAL_BEGIN, writer=LineWriter.FIRST) if seen.done < seen.total else None
        return LogReading(step=seen.done, writer=LineWriter.FIRST)

    def _dictionary(self, line: str) -> LogReading | None:
        line = line.strip()
        begin = _TRAINER_LOGGED.match(line)  # LLaMA-Factory's callback logs the dictionary instead of printing it
        if begin is None or len(line) > DICTIONARY_CHARS_MAX:
            return None
        values = {name: number(value) for name, _, value in _DICTIONARY_VALUE.findall(line)}
        if "epoch" in values and ("eval_loss" in values or "eval_runtime" in values):
            return LogReading(quiet=Quiet.EVAL_END, writer=LineWriter.FIRST)
        loss = next((values[name] for name, rate in _TRAINER_LOSSES if name in values and rate in values), None)
        if loss is None:
            return None
        if self._shown is not None:
            self._total = self._shown[1]
        step = next((values[name] for name in _STEP_NAMES if name in values), None)
        return LogReading(
            step=int(step) if step is not None and 0 <= step < STEP_MAX else None,
            loss=loss,
            grad_norm=values.get("grad_norm"),
            writer=LineWriter.FIRST,
        )


def _hugging_face_parser() -> Parse:
    return HuggingFaceLogParser()


HUGGING_FACE = Framework(
    "hugging_face",
    (
        b"it/s",
        b"s/it",
        b"{'loss'",
        b"{'eval_",
        b"'loss/policy_avg'",
        b"***** Running Evaluation",
        b"Saving model checkpoint to ",
    ),
    _hugging_face_parser,
)


# Lightning's CSVLogger: ``metrics.csv``, whose first line names the columns.
#
# A pre-existing file is read from its end, and its columns are unknown until Lightning rewrites it, as it does when a
# metric is added.
CSV_LINE_CHARS_MAX = 8_192
COLUMNS_MAX = 256

_CSV_LOSSES = ("train_loss_step", "train_loss", "train/loss", "reduced_train_loss", "loss_step", "loss")
_CSV_NORMS = ("grad_norm", "train/grad_norm", "grad_2.0_norm_total")


class LightningCsvParser:
    """Parses the lines of one file."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not from such a file."""
        if len(line) > CSV_LINE_CHARS_MAX or "," not in line:
            return None
        cells = [cell.strip() for cell in line.split(",", COLUMNS_MAX)]
        if "step" in cells and "epoch" in cells:
            self._columns = cells if any(name in cells for name in _CSV_LOSSES) else []
            return LogReading(writer=LineWriter.FIRST) if self._columns else None
        if not self._columns or len(cells) != len(self._columns):
            return None
        row = dict(zip(self._columns, cells, strict=True))
        loss = next((found for name in _CSV_LOSSES if (found := number(row.get(name, ""))) is not None), None)
        if loss is None or not row["step"].isdecimal() or len(row["step"]) > len(str(STEP_MAX)):
            return None  # an evaluation line has no training loss
        norm = next((found for name in _CSV_NORMS if (found := number(row.get(name, ""))) is not None), None)
        return LogReading(step=int(row["step"]), loss=loss, grad_norm=norm, writer=LineWriter.FIRST)


def _csv_parser() -> Parse:
    return LightningCsvParser()


LIGHTNING_CSV = Framework("lightning_csv", (b"step,", b",step"), _csv_parser, needles_once_known=(b",",))


# MLPerf log lines, ``:::MLLOG {json}``, of any program.
#
# Progress is counted in samples and converted to steps by the global batch size, which is logged at the start. The
# steps of a log found later are unknown. Some programs count tokens by the same names: their counts are beyond what the
# samples of as many steps as fit between two lines could be, and are converted by the sequence length as well.
MLLOG_MARK = ":::MLLOG "
MLLOG_LINE_CHARS_MAX = 8_192

_MLLOG_LOSSES = ("reduced_train_loss", "train_loss", "loss")
_MLLOG_SAMPLES = ("samples_count", "step", "epoch_num")  # names that programs use for the number of samples trained on
_MLLOG_STEP_S = ("train_step_time", "train_step_timing in s")
TOKENS_RATIO = 8.0  # of steps by samples to those that fit between two lines: shorter sequences than this do not occur
_MLLOG_EVALUATED = ("validation", "eval")
_MLLOG_QUIET = {"eval_start": Quiet.EVAL_BEGIN, "eval_stop": Quiet.EVAL_END}


class _MlLogEntry(msgspec.Struct):
    """One line; unlisted keys are ignored."""

    key: str
    time_ms: float = math.nan
    value: object = None
    metadata: dict[str, object] = {}

    @property
    def stamp_s(self) -> float | None:
        """The line's time."""
        return self.time_ms / 1e3 if math.isfinite(self.time_ms) else None


_mllog_decoder = msgspec.json.Decoder(_MlLogEntry)


class MlLogParser:
    """Parses the lines of one log."""

    def __init__(self) -> None:
        self._batch_size = 0.0  # samples per step; 0: unknown
        self._sequence_length = 0.0  # tokens per sample; 0: unknown
        self._in_tokens: bool | None = None  # what the program counts; None: not known yet
        self._before: tuple[float, float] | None = None  # count and stamp of the last line of progress, or the start
        self._step = 0  # the last one of this run

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not MLPerf's or contains no progress."""
        at = line.find(MLLOG_MARK, 0, 200)
        if at < 0 or len(line) > MLLOG_LINE_CHARS_MAX:
            return None
        entry = decoded(line[at + len(MLLOG_MARK) :], _mllog_decoder)
        if entry is None:
            return None
        if entry.key == "global_batch_size":
            self._batch_size = _json_count(entry.value) or 0.0
            self._step, self._before = 0, None if entry.stamp_s is None else (0.0, entry.stamp_s)
            return LogReading(writer=LineWriter.FIRST)
        if entry.key == "max_sequence_length":
            self._sequence_length = _json_count(entry.value) or 0.0
            return LogReading(writer=LineWriter.FIRST)
        if entry.key in _MLLOG_QUIET:
            return LogReading(quiet=_MLLOG_QUIET[entry.key], stamp_s=entry.stamp_s, writer=LineWriter.FIRST)
        if entry.key == "tracked_stats" and isinstance(entry.value, dict):
            return self._progress(entry.value, entry)
        if entry.key == "train_loss":
            return self._progress({"train_loss": entry.value}, entry)
        return None

    def _progress(self, values: dict[str, object], entry: _MlLogEntry) -> LogReading:
        if any(name.startswith(_MLLOG_EVALUATED) for name in values):
            return LogReading(writer=LineWriter.FIRST)  # counts evaluation samples
        step_s = next((found for name in _MLLOG_STEP_S if (found := _json_count(values.get(name))) is not None), None)
        counted = next(
            (found for name in _MLLOG_SAMPLES if (found := _json_count(entry.metadata.get(name))) is not None), None
        )
        step = None
        if counted is not None and self._batch_size >= 1.0:
            per_step = self._counted_per_step(counted, entry.stamp_s, step_s)
            if per_step is not None and counted / per_step < STEP_MAX:
                step = int(counted / per_step)
        if step is not None:
            if step <= self._step:
                return LogReading(writer=LineWriter.FIRST)  # a summary of earlier lines, or a start
            self._step = step
        return LogReading(
            step=step,
            step_s=step_s,
            loss=next((_json_number(values[name]) for name in _MLLOG_LOSSES if name in values), None),
            stamp_s=entry.stamp_s,
            writer=LineWriter.FIRST,
        )

    def _counted_per_step(self, counted: float, stamp_s: float | None, step_s: float | None) -> float | None:
        """Return by how much the program's count grows in a step: samples, or tokens; None until that is known."""
        if self._in_tokens is None and self._sequence_length > 1.0 and step_s and stamp_s is not None:
            before, self._before = self._before, (counted, stamp_s)
            if before is None or counted <= before[0]:
                return None
            fit = max(stamp_s - before[1], step_s) / step_s
            many = (counted - before[0]) / self._batch_size > TOKENS_RATIO * fit
            if many and before[0] == 0.0:
                return None  # tokens, or a run that was resumed
            self._in_tokens = many
        return self._batch_size * (self._sequence_length if self._in_tokens else 1.0)


def _json_number(value: object) -> float | None:
    """Return a JSON value as a number; None: it is not one. What JSON lacks is written as text."""
    if isinstance(value, str):
        return number(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _json_count(value: object) -> float | None:
    """Return a JSON value as a finite number that is not negative; None: it is not one."""
    found = _json_number(value)
    return found if found is not None and 0.0 <= found < math.inf else None


def _mllog_parser() -> Parse:
    return MlLogParser()


MLLOG = Framework("mllog", (b":::MLLOG ",), _mllog_parser)


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


_torchtitan_decoder = msgspec.json.Decoder(_Record)


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
        record = decoded(line, _torchtitan_decoder)
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


def _torchtitan_parser() -> Parse:
    return TorchtitanLogParser()


TORCHTITAN = Framework(
    "torchtitan", (b"tps: ", b"aving the checkpoint", b"Saving a full ", b'"log_type_name"'), _torchtitan_parser
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
