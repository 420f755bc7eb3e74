"""The engine: windows of samples, detectors, fusion of verdicts, and policy.

Input: samples, events and the time, as arguments. Output: judgements and decisions. Pure: no clock, disk or network.
"""
