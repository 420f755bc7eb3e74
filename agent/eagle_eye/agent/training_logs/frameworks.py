"""The supported frameworks, and detection of a log's framework. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_eye.agent.training_logs.composer import COMPOSER
from eagle_eye.agent.training_logs.deepspeed import DEEPSPEED
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
from eagle_eye.agent.training_logs.megatron import MEGATRON
from eagle_eye.agent.training_logs.mllog import MLLOG
from eagle_eye.agent.training_logs.nanotron import NANOTRON
from eagle_eye.agent.training_logs.nemo import NEMO
from eagle_eye.agent.training_logs.olmo import OLMO
from eagle_eye.agent.training_logs.reading import Framework, LogReading
from eagle_eye.agent.training_logs.torchtitan import TORCHTITAN

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
