"""What a user's job script does without a launcher that chooses: it resumes from the newest checkpoint.

Becomes the command that ``RECOVERY_COMMAND`` names (a JSON list): with it on its own command line torchrun would be
taken for a rank by whoever harms ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

COMMAND_VARIABLE, FOLDER_VARIABLE = "RECOVERY_COMMAND", "RECOVERY_CHECKPOINTS"


def newest(folder: Path) -> str:
    """Return the complete checkpoint of the highest step, "" where there is none."""
    complete = [path for path in folder.glob("step_*") if (path / ".metadata").exists()]
    return str(max(complete, key=lambda path: int(path.name.partition("_")[2]), default=""))


if __name__ == "__main__":
    os.environ["EAGLE_EYE_RESUME_FROM"] = newest(Path(os.environ[FOLDER_VARIABLE]))
    os.environ["EAGLE_EYE_ATTEMPT"] = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.execv(sys.executable, [sys.executable, *json.loads(os.environ[COMMAND_VARIABLE])])
