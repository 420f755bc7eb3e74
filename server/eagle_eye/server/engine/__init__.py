"""Judging: windows of samples, detectors, fusion, policy.

In: samples, events and the time, as arguments. Out: judgements and decisions. Pure: no clock, disk or network.
"""
