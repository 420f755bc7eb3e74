"""Leaves out tests that passed in an earlier run of this checkout, for continuous integration (``.ci/run``).

It runs the tests as a user's machine has it, then installs what the skipped ones ask for and runs those and the slow
ones: none of the thousands that have passed takes its time twice. What failed or was skipped is run again.
"""

from __future__ import annotations

import pytest

KEY = "eagle_eye/passed"  # in pytest's cache


def pytest_configure(config: pytest.Config) -> None:
    """Note what passes, in the process that sees the reports of all workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    passed = _passed(config)
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]


class Passed:
    """What has passed, in this run and before, and has not failed since."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._passed = _passed(config)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what one phase of a test came to."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Keep it for the next run."""
        assert self._config.cache is not None
        self._config.cache.set(KEY, sorted(self._passed - self._failed))


def _passed(config: pytest.Config) -> set[str]:
    assert config.cache is not None, "passed_before needs pytest's cache"
    return set(config.cache.get(KEY, []))
