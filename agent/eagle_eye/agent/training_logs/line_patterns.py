"""Frameworks that log a step in one line, as data: a regular expression with named groups per wording. Pure.

A site's own lines are parsed the same way. Groups: ``step``; ``loss``; ``grad_norm``; the seconds per step as
``step_s``, ``step_ms`` or ``steps_per_second``; ``tokens_per_second`` of the rank or ``job_tokens_per_second``;
``eval`` matches in lines that end an evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_eye.agent.training_logs.lines import NUMBER, Framework, LineWriter, LogReading, Parse, Quiet, number

GROUPS = (
    "step", "loss", "grad_norm", "step_s", "step_ms", "steps_per_second", "tokens_per_second", "job_tokens_per_second",
    "eval",
)  # fmt: skip
BEGUN = "begun_step"  # of our own patterns alone: the step that begins, one after the last finished one
SITE_PATTERNS_MAX = 16
SITE_PATTERN_CHARS_MAX = 1_000
SITE_LINE_CHARS_MAX = 1_000  # the longest line on which a site's own pattern is tried: its cost is unknown


class BadLinePattern(ValueError):
    """An invalid site pattern; the message says why."""


@dataclass(frozen=True)
class Wording:
    """One wording of a framework's line, and the rank that writes it."""

    pattern: re.Pattern[str]
    writer: LineWriter = LineWriter.FIRST


def reading(found: re.Match[str], writer: LineWriter) -> LogReading | None:
    """Return the values of a match's groups; None where they hold no number."""
    groups = found.groupdict()
    if groups.get("eval") is not None:
        return LogReading(quiet=Quiet.EVAL_END, writer=writer)
    values = {name: number(text) for name, text in groups.items() if text is not None and name not in ("step", BEGUN)}
    step_s, step_ms, rate = values.get("step_s"), values.get("step_ms"), values.get("steps_per_second")
    if step_ms is not None:
        step_s = step_ms / 1e3
    elif rate:
        step_s = 1.0 / rate
    step = groups.get("step")
    if groups.get(BEGUN) is not None:
        step = str(int(groups[BEGUN]) - 1)
    if step is None and all(value is None for value in values.values()):
        return None
    return LogReading(
        step=int(step) if step is not None else None,
        step_s=step_s,
        loss=values.get("loss"),
        grad_norm=values.get("grad_norm"),
        tokens_per_second=values.get("tokens_per_second"),
        job_tokens_per_second=values.get("job_tokens_per_second"),
        writer=writer,
    )


def _parser(wordings: Sequence[Wording], chars_max: int | None = None) -> Parse:
    def parse(line: str) -> LogReading | None:
        if chars_max is not None and len(line) > chars_max:
            return None
        for wording in wordings:
            found = wording.pattern.search(line)
            if found is not None:
                return reading(found, wording.writer)
        return None

    return parse


def _framework(
    name: str, needles: tuple[bytes, ...], *patterns: str, writer: LineWriter = LineWriter.FIRST
) -> Framework:
    wordings = [Wording(re.compile(pattern), writer) for pattern in patterns]
    return Framework(name, needles, lambda: _parser(wordings))


def site_framework(patterns: Sequence[str]) -> Framework:
    """Return a site's own patterns as one framework, ``site``, searched in each line. Raises BadLinePattern."""
    if len(patterns) > SITE_PATTERNS_MAX:
        raise BadLinePattern(f"{len(patterns)} patterns; at most {SITE_PATTERNS_MAX} can be given")
    wordings = []
    for text in patterns:
        if len(text) > SITE_PATTERN_CHARS_MAX:
            raise BadLinePattern(f"a pattern of {len(text)} characters; at most {SITE_PATTERN_CHARS_MAX} are read")
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise BadLinePattern(f"{text[:200]!r} is no regular expression: {error}") from None
        unknown = sorted(set(pattern.groupindex) - set(GROUPS))
        if unknown or not pattern.groupindex:
            said = f"group {unknown[0]!r} is not known" if unknown else "it names no group"
            raise BadLinePattern(f"{text[:200]!r}: {said}; groups are (?P<name>...) of {', '.join(GROUPS)}")
        wordings.append(Wording(pattern, LineWriter.ANY))
    return Framework(SITE, (b"",), lambda: _parser(wordings, SITE_LINE_CHARS_MAX))


SITE = "site"

_N = NUMBER
_STEP = r"(?P<step>[0-9]{1,12})"

# Each process prints, with its own device's tokens.
MAXTEXT = _framework(
    "maxtext",
    (b"completed step: ",),
    rf"\bcompleted step: {_STEP}, seconds: (?P<step_s>{_N}), TFLOP/s/device: {_N}, "
    rf"Tokens/s/device: (?P<tokens_per_second>{_N}), .{{0,200}}?\bloss: (?P<loss>{_N})",
    rf"\bcompleted step: {_STEP}, seconds: (?P<step_s>{_N}),",
    writer=LineWriter.ANY,
)
# nanoGPT, build-nanogpt, llm.c, modded-nanogpt. Their tokens are the job's.
NANOGPT = _framework(
    "nanogpt",
    (b"iter ", b"| loss", b"train_time:", b"train loss "),
    rf"^iter {_STEP}: loss (?P<loss>{_N}), time (?P<step_ms>{_N})ms\b",
    rf"^step {{1,12}}[0-9]{{1,12}}: (?P<eval>train loss {_N}, val loss {_N})",
    rf"^step {{1,12}}{_STEP}(?:/[0-9]{{1,12}})? \| loss:? (?P<loss>{_N})(?: \([^()]{{1,16}}\))? ?\|"
    rf"(?: lr:? {_N} \|)? norm:? (?P<grad_norm>{_N})(?: \([^()]{{1,16}}\))? ?\|(?: lr:? {_N} ?\|)?"
    rf" (?:dt: )?(?P<step_ms>{_N}) ?ms \|(?: {_N}% bf16 MFU \|)?"
    rf"(?: tok/sec:)? (?P<job_tokens_per_second>{_N})(?: tok/s)?",
    rf"^step:[0-9]{{1,12}}/[0-9]{{1,12}} (?P<eval>val_loss:{_N}) ",
    rf"^step:{_STEP}/[0-9]{{1,12}} (?:train_loss:(?P<loss>{_N}) )?train_time:{_N}ms step_avg:",
)
LITGPT = _framework(
    "litgpt",
    (b"| iter ",),
    rf"^Epoch [0-9]{{1,9}} \| iter [0-9]{{1,12}} step {_STEP} \| loss train: (?P<loss>{_N}),",
)
# fairseq and metaseq, both of fairseq's line-based log formats. "wps" is the job's words per second.
FAIRSEQ = _framework(
    "fairseq",
    (b"| train_inner | ", b"| valid | "),
    rf'\| train_inner \| \{{.{{0,1000}}?"loss": "(?P<loss>{_N})".{{0,1000}}?"wps": "(?P<job_tokens_per_second>{_N})", '
    rf'"ups": "(?P<steps_per_second>{_N})".{{0,400}}?"num_updates": "{_STEP}"'
    rf'(?:.{{0,200}}?"gnorm": "(?P<grad_norm>{_N})")?',
    rf"\| train_inner \| epoch .{{0,200}}?\bloss=(?P<loss>{_N}),.{{0,600}}?"
    rf"\bwps=(?P<job_tokens_per_second>{_N}), ups=(?P<steps_per_second>{_N}),.{{0,200}}?"
    rf"\bnum_updates={_STEP},(?:.{{0,200}}?\bgnorm=(?P<grad_norm>{_N}))?",
    r"\| valid \| (?P<eval>[{e])",
)
# The controller prints a step's number as it begins, and its values as it ends.
NEMO_RL = _framework(
    "nemo_rl",
    (b"= Step ", b"Loss: ", b"Total step time: "),
    rf"^={{5,40}} Step (?P<{BEGUN}>[1-9][0-9]{{0,11}})/[0-9]{{1,12}} ={{5,40}}\s{{0,4}}$",
    rf"^\s{{1,8}}\u2022 Loss: (?P<loss>{_N})\s{{0,4}}$",
    rf"^\s{{1,8}}\u2022 Total step time: (?P<step_s>{_N})s\s{{0,4}}$",
)
# The controller prints; a step is one of reinforcement learning, or of its supervised trainer.
VERL = _framework(
    "verl",
    (b"step:",),
    rf"^step:{_STEP} - (?=.{{0,4000}}?\b(?:actor/pg_loss|train/loss):(?:np\.float(?:32|64)\()?(?P<loss>{_N}))"
    rf"(?=(?:.{{0,4000}}?\b(?:actor|train)/grad_norm:(?:np\.float(?:32|64)\()?(?P<grad_norm>{_N}))?)"
    rf"(?=(?:.{{0,6000}}?\btiming_s/step:(?:np\.float(?:32|64)\()?(?P<step_s>{_N}))?)"
    rf"(?=(?:.{{0,6000}}?\bperf/throughput:(?:np\.float(?:32|64)\()?(?P<tokens_per_second>{_N}))?)",
)
