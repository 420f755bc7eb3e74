"""``eagle-eye checkpoint plan``: what it says to people and to programs, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.checkpoint.shared_memory import MemoryPlan
from eagle_eye.cli.main import main

TOPOLOGY = {
    "switch_of_node": {f"gpu{n}": f"leaf{n % 2}" for n in range(1, 9)},
    "rack_of_node": {f"gpu{n}": f"r{(n + 1) // 2}" for n in range(1, 9)},
    "switch_of_link": {"gpu1": {"mlx5_0": "rail0"}},
}


@pytest.fixture
def topology(tmp_path: Path) -> str:
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(TOPOLOGY))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["checkpoint", "plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def reported(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["checkpoint", "plan", *words]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_number_of_nodes_is_counted_through(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--nodes", "5")
    assert list(found["holders"]) == ["n1", "n2", "n3", "n4", "n5"]
    assert (found["nodes"], found["replicas"], len(found["groups"]), len(found["ring"])) == (5, 2, 1, 3)


def test_names_are_read_as_slurm_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(planned(capsys, "--nodes", "gpu[08-10],login")["holders"]) == ["gpu08", "gpu09", "gpu10", "login"]


def test_of_a_topology_a_number_takes_the_first_nodes(capsys: pytest.CaptureFixture[str], topology: str) -> None:
    assert list(planned(capsys, "--nodes", "3", "--topology", topology)["holders"]) == ["gpu1", "gpu2", "gpu3"]


def test_the_ratio_of_losses_that_are_outlived_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    losses = planned(capsys, "--nodes", "16")["node_losses"]
    assert [(one["lost"], round(one["survival_ratio"], 3)) for one in losses] == [
        (1, 1.0),
        (2, 0.933),
        (3, 0.8),
        (4, 0.615),
    ]
    lines = reported(capsys, "--nodes", "16")
    assert lines[-4:] == ["1 node 100%", "2 nodes 93.3%", "3 nodes 80.0%", "4 nodes 61.5%"]


def test_what_is_not_certain_is_never_told_as_certain(capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 nodes 99.97%" in reported(capsys, "--nodes", "4000")


def test_copies_are_parted_from_switches_and_racks(capsys: pytest.CaptureFixture[str], topology: str) -> None:
    found = planned(capsys, "--nodes", "gpu[1-8]", "--topology", topology)
    assert found["shared_domains"] == {}
    one = {loss["kind"]: loss["survival_ratio"] for loss in found["domain_losses"] if loss["lost"] == 1}
    assert one == {"switch": 1.0, "rack": 1.0}


def test_copies_that_share_a_domain_are_told(capsys: pytest.CaptureFixture[str], topology: str) -> None:
    lines = reported(capsys, "--nodes", "gpu[1-2]", "--topology", topology)
    assert lines[lines.index("all copies in one failure domain:") + 1] == "rack r1: gpu1 gpu2"


def test_nodes_that_the_topology_does_not_name_are_told(capsys: pytest.CaptureFixture[str], topology: str) -> None:
    lines = reported(capsys, "--nodes", "gpu1,gpu2,gpu9", "--topology", topology)
    assert "not in the topology, each taken to stand alone: gpu9" in lines


def test_sets_of_domains_that_nobody_counted_are_null_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({"rack_of_node": {f"n{n}": f"r{n}" for n in range(1, 201)}}))
    words = ("--nodes", "200", "--topology", str(file))
    assert planned(capsys, *words)["domain_losses"][-1] == {"kind": "rack", "lost": 3, "survival_ratio": None}
    assert reported(capsys, *words)[-1] == "3 racks not counted: too many sets"


def test_the_memory_is_told_as_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "4", "--shard-bytes", "3GiB", "--keep", "2")
    arithmetic = "2 copies x (2 kept + 1 arriving + 1 persisting) x 3.0 GiB = 24.0 GiB"
    assert reported(capsys, *words)[-1] == f"memory of a node: {arithmetic}"
    memory = planned(capsys, *words)["memory"]
    assert str(MemoryPlan(**{key: memory[key] for key in memory if key != "total_bytes"})) == arithmetic
    assert memory["total_bytes"] == 24 << 30


def test_steps_that_reach_further_back_are_in_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "4", "--shard-bytes", "3GiB", "--reach", "600")
    assert "(2 kept + 2 spaced + 1 arriving + 1 persisting)" in reported(capsys, *words)[-1]
    assert planned(capsys, *words)["memory"]["spaced"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2", "--replicas", "3"], "--replicas: 3 copies need as many nodes, got 2"),
        (["--nodes", "0"], "--nodes: expected 1 to 65536, got 0"),
        (["--nodes", "9" * 50], "--nodes: expected 1 to 65536, got 99999999999999999999"),
        (["--nodes", ""], "--nodes: expected a number or names such as gpu[01-16],gpu20, got none"),
        (["--nodes", "n[1-"], "--nodes: brackets do not match in 'n[1-'"),
        (["--nodes", "a,a"], "--nodes: a is named 2 times"),
        (["--nodes", "9", "--topology", "TOPOLOGY"], "--nodes: --topology names 8 nodes, not 9; say which, by name"),
        (["--nodes", "4", "--shard-bytes", "much"], "--shard-bytes: expected a size such as 3GiB"),
        (["--nodes", "4", "--shard-bytes", "1", "--keep", "0"], "--keep: expected 1 to 100, got 0"),
        (["--nodes", "4", "--shard-bytes", "1", "--reach", "-1"], "--reach: expected seconds, 0 or more, got -1.0"),
        (["--nodes", "4", "--topology", "missing.json"], "--topology: missing.json: No such file or directory"),
        ([], "the following arguments are required: --nodes"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], topology: str
) -> None:
    assert main(["checkpoint", "plan", *(topology if word == "TOPOLOGY" else word for word in words)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


@pytest.mark.parametrize("content", ["", "[]", '{"rack_of_node": ["n1"]}', '{"switch_of_node": {"n1": 1}}'])
def test_a_topology_that_is_none_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text(content)
    assert main(["checkpoint", "plan", "--nodes", "4", "--topology", str(tmp_path / "file")]) == 2
    assert 'expected {"switch_of_node"' in capsys.readouterr().err


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys; from eagle_eye.cli.main import main\n"
        "code = main(['checkpoint', 'plan', '--nodes', '4', '--json'])\n"
        "print(code, sorted({'torch', 'numpy', 'xxhash', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
