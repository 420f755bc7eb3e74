"""Starts the command from the files of the host package: its libraries come first, the distribution's are not asked."""

import sys
from pathlib import Path

home = Path(__file__).resolve().parent
sys.path[1:1] = [str(home / "eagle-eye"), str(home / f"python{sys.version_info[0]}.{sys.version_info[1]}")]
sys.path[0:1] = []

from eagle_eye.cli.main import main  # noqa: E402 - the path comes first

sys.argv[0] = "eagle-eye"
sys.exit(main())
