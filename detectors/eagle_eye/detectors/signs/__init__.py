"""Measurements shared by several detectors: pace, peers, counters, topology."""
