"""Keeps a replica group of torchft on its node: forked from this process whenever it is gone.

This process has imported what the group needs. While the node is in the exclude file the group is ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import benchmarks.replanning.torchft_train  # noqa: F401 - so that no group has to
from benchmarks.replanning.peers import AGAIN_S
from benchmarks.torchft.storm import read_excluded
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, prctl, run_as_main, show

LOOK_S = 0.05


def main() -> None:
    """Keep the group until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--excluded", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("script", nargs="+")
    args = parser.parse_args()
    env = dict(one.split("=", 1) for one in args.env)
    group, started_s = 0, -AGAIN_S
    while True:
        if group and os.waitpid(group, os.WNOHANG)[0]:
            group = 0
        out = args.node in read_excluded(args.excluded)
        if group and out:
            os.kill(group, signal.SIGKILL)
        elif not group and not out and time.monotonic() - started_s > AGAIN_S:
            group, started_s = os.fork(), time.monotonic()
            if group == 0:
                _become_group(args.script, env)
        time.sleep(LOOK_S)


def _become_group(script: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    show([sys.executable, *script], os.environ)
    run_as_main(script)


if __name__ == "__main__":
    main()
