"""Samples in: agents' frames and rows, and Prometheus remote write.

In: requests. Out: durable frames in the history, and the same frames shown to detection. Judges nothing.
"""
