"""Traces for ``backtest`` out of a Prometheus.

In: range queries. Out: a trace on disk. Touches no running server.
"""
