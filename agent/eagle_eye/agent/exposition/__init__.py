"""Prometheus text format: the agent's own ``/metrics``, and a parser for other exporters' pages."""
