"""Environment variables of a rank with a restart point; names only, for hooks in training processes."""

from __future__ import annotations

SOCKET_VARIABLE = "EAGLE_EYE_RESTART_SOCKET"  # the runner's socket (restart_point.py), without the leading NUL
# The number that torch's flight recorder gave the last process group of earlier attempts in this process: groups with
# it, or a lower one, are over. "unknown" if the recorder does not report it.
LAST_GROUP_VARIABLE = "EAGLE_EYE_LAST_PROCESS_GROUP"
HOOK_ATTEMPT_VARIABLE = "EAGLE_EYE_HOOK_ATTEMPT"  # the attempt that this process's hook reports, while attached
