"""The frameworks whose logs are known, and which of them a log is of. Pure."""

from __future__ import annotations

from eagle_eye.agent.training_logs.composer import COMPOSER
from eagle_eye.agent.training_logs.deepspeed import DEEPSPEED
from eagle_eye.agent.training_logs.hugging_face import HUGGING_FACE
from eagle_eye.agent.training_logs.megatron import MEGATRON
from eagle_eye.agent.training_logs.nanotron import NANOTRON
from eagle_eye.agent.training_logs.nemo import NEMO
from eagle_eye.agent.training_logs.reading import Framework, Parse, Reading
from eagle_eye.agent.training_logs.torchtitan import TORCHTITAN

# In the order in which they are tried on a log that has not shown yet what it is.
FRAMEWORKS: tuple[Framework, ...] = (MEGATRON, TORCHTITAN, HUGGING_FACE, NEMO, NANOTRON, COMPOSER, DEEPSPEED)


class LogParser:
    """Reads the lines of one log; of which framework it is shows the first line that one of them knows.

    A library below (DeepSpeed) decides nothing: its lines are read beside those of the framework above. ``framework``
    is its name, "" until known; ``needles`` are what lines hold that are worth parsing.
    """

    framework: str
    needles: tuple[bytes, ...]

    def __init__(self, framework: str = "") -> None:
        """``framework`` is the name of the only one to expect, empty: any."""
        self._keep(framework, [(known, known.parser()) for known in FRAMEWORKS])

    def parse(self, text: str) -> Reading | None:
        """Return what a line without prefixes says, None when it is no framework's."""
        for framework, parse in self._parsers:
            reading = parse(text)
            if reading is not None:
                if not framework.engine and not self.framework:
                    self._keep(framework.name, self._parsers)
                return reading
        return None

    def _keep(self, framework: str, parsers: list[tuple[Framework, Parse]]) -> None:
        self.framework = framework
        self._parsers = [item for item in parsers if not framework or item[0].engine or item[0].name == framework]
        self.needles = tuple(needle for known, _ in self._parsers for needle in known.needles)
