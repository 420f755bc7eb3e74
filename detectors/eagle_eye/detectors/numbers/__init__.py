"""Detectors of wrong numbers: broken or diverging losses and silent data corruption."""
