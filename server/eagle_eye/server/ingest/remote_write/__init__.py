"""Ingestion of Prometheus remote write.

In: compressed protobuf requests (versions 1 and 2). Out: frames as agents would have sent them.
"""
