"""Continuous integration runs every test that this repository has, or a target of the Makefile says what it needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ELSEWHERE = {
    "EAGLE_EYE_TEST_DASHBOARD_PICTURES": "check-dashboards",
    "EAGLE_EYE_TEST_GRAFANA_SCHEMA": "test-grafana-schema",
    "EAGLE_EYE_TEST_KUBERNETES": "test-kubernetes",
    "EAGLE_EYE_TEST_NEWCOMER": "test-newcomer",
}
# Where packages come from; records anew; how many cases, and which; where recorded data is; whose torch.
NO_GATES = {
    "EAGLE_EYE_TEST_CASES",
    "EAGLE_EYE_TEST_DATA",
    "EAGLE_EYE_TEST_DEBIAN_MIRROR",
    "EAGLE_EYE_TEST_RECORD",
    "EAGLE_EYE_TEST_SEED",
    "EAGLE_EYE_TEST_TORCH_PYTHON",
}


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, f"the Makefile has no target {target}"
    return found[1]


def test_every_gate_before_a_test_is_opened_by_a_target() -> None:
    gates = {
        gate
        for file in (ROOT / "tests").rglob("*.py")
        for gate in re.findall(r"\bEAGLE_EYE_TEST_[A-Z_]+\b", file.read_text(encoding="utf-8"))
    }
    shut = [gate for gate in gates - NO_GATES if f"{gate}=" not in recipe(ELSEWHERE.get(gate, "test-full"))]
    assert sorted(shut) == []


def test_continuous_integration_runs_the_rest_of_the_full_set_last_with_nobody_at_the_keyboard(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nreadlink /proc/self/fd/0 >> {tmp_path}/input\n'
        f'echo "$TEST_OPTIONS" >> {tmp_path}/options\n'
    )
    make.chmod(0o755)
    subprocess.run(
        [str(ROOT / ".ci/run")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
        capture_output=True,
        timeout=60.0,
    )
    assert (tmp_path / "calls").read_text().split() == ["check", "docs", "test", "test-full"]
    assert set((tmp_path / "input").read_text().split()) == {"/dev/null"}
    assert set((tmp_path / "options").read_text().splitlines()) == {"-p tests.passed_before"}
    assert "$(TEST_OPTIONS)" in recipe("test-again")


def test_only_what_failed_is_tried_again_with_the_same_gates(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$*" != "$FAILS" ]\n')
    make.chmod(0o755)
    again = {"check": [], "test": ["test-again", "test-full"], "test-full": ["test-again"]}
    for fails, follows in again.items():
        (tmp_path / "calls").unlink(missing_ok=True)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FAILS": fails}
        done = subprocess.run([str(ROOT / ".ci/run")], env=environ, check=False, capture_output=True, timeout=60.0)
        assert done.returncode == (0 if follows else 1)
        calls = (tmp_path / "calls").read_text().split()
        assert calls[calls.index(fails) + 1 :] == follows
    assert re.findall(r"EAGLE_EYE\w+=1", recipe("test-again")) == re.findall(r"EAGLE_EYE\w+=1", recipe("test-full"))


def test_what_fails_again_fails(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\ncase "$*" in test*) exit 1 ;; esac\n')
    make.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([str(ROOT / ".ci/run")], env=environ, check=False, capture_output=True, timeout=60.0)
    assert done.returncode != 0


def test_packages_are_installed_without_a_question() -> None:
    assert "DEBIAN_FRONTEND=noninteractive" in MAKEFILE
    assert recipe("test-full").count("$(APT) ") == MAKEFILE.count("$(APT) ") == 2
    assert "apt-get" not in recipe("test-full")
