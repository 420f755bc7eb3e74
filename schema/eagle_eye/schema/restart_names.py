"""The environment variables of a rank with a restart point; nothing but names, for hooks in training processes."""

from __future__ import annotations

SOCKET_VARIABLE = "EAGLE_EYE_RESTART_SOCKET"  # where the runner listens (restart_point.py), without the NUL in front
# The number that torch's flight recorder gave the last process group of the attempts before in this process: what has
# it, or a lower one, is over. "unknown" where the recorder does not say.
LAST_GROUP_VARIABLE = "EAGLE_EYE_LAST_PROCESS_GROUP"
HOOK_ATTEMPT_VARIABLE = "EAGLE_EYE_HOOK_ATTEMPT"  # the attempt that this process's hook reports, while it is attached
