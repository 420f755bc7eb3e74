"""Sample ingestion: agents' frames and rows, and Prometheus remote write.

In: requests. Out: durable frames in the history, and the same frames passed to detection. Makes no verdicts.
"""
