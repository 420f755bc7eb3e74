"""What several detectors look for: pace, peers, counters, topology."""
