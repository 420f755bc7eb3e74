"""Prometheus' text format: the agent's own ``/metrics``, and other exporters' pages read."""
