"""Numbers that are wrong: losses that diverge, parameters that differ."""
