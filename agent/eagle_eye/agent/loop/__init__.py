"""The agent's only loop: a clock, collectors that run in threads of their own, one frame at each tick."""
