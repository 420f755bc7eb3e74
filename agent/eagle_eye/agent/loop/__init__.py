"""The agent's main loop: a clock, collectors in threads of their own, one frame per tick."""
