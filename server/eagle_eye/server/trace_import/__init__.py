"""Imports traces for ``backtest`` from a Prometheus.

In: range queries. Out: a trace on disk. Touches no running server.
"""
