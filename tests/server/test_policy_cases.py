"""Written cases of policy, and the command that runs and explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_eye.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "docs" / "reference" / "policy-cases.toml"
ONE = """
format = "eagle-eye-policy-cases/1"
[[case]]
name = "a lost GPU"
incident = {{ fault = "gpu_lost", fact = true }}
{more}
expect = {{ {expect} }}
"""


def written(folder: Path, expect: str, more: str = "") -> str:
    file = folder / "cases.toml"
    file.write_text(ONE.format(expect=expect, more=more))
    return str(file)


def test_the_shipped_example_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "test", str(EXAMPLE)]) == 0
    assert capsys.readouterr().out.endswith("33 of 33 cases passed\n")


def test_a_case_that_fails_says_what_differs_and_which_rule_said_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "test", written(tmp_path, 'kind = "notify", rule = "blind"')]) == 1
    reported = capsys.readouterr().out
    assert "FAILED  a lost GPU" in reported
    assert "kind: expected 'notify', got 'exclude_node'" in reported
    assert "rule: expected 'blind', got ''" in reported
    assert "kinds one, two" in reported


def test_a_case_says_which_terms_of_nodes_held(capsys: pytest.CaptureFixture[str]) -> None:
    main(["policy", "test", str(EXAMPLE)])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("passed  NVLinks of a tray in an NVL72 rack ask for a drain")
    assert "drain_node in place of exclude_node for nvlink_degraded on n1 (policy.nodes[0])" in lines[at + 1]
    at = next(place for place, line in enumerate(lines) if "a lent host" in line)
    assert "confidence_min 0.99 (policy.nodes[1])" in lines[at + 1]
    at = lines.index("passed  a node of a group is reported, whatever holds for its GPUs")
    assert "notify in place of exclude_node for nvlink_degraded on loan-7 (policy.nodes[2])" in lines[at + 1]


def test_cases_can_be_read_by_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "test", written(tmp_path, 'mode = "act"'), "--json"]) == 0
    (reported,) = json.loads(capsys.readouterr().out)
    assert (reported["name"], reported["passed"], reported["decision"]["kind"]) == ("a lost GPU", True, "exclude_node")


def test_a_sites_own_settings_are_tried_before_they_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.toml"
    config.write_text("[policy]\nmode = 'approve'\nexclusions_per_job = 0\n")
    file = written(tmp_path, 'mode = "approve", rule = "job_exclusions"')
    assert main(["policy", "test", file, "--config", str(config)]) == 0
    assert main(["policy", "test", file]) == 1
    capsys.readouterr()


def test_a_sites_racks_are_known_to_its_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology, config = tmp_path / "topology.json", tmp_path / "server.toml"
    topology.write_text('{"rack_of_node": {"n1": "r12"}}')
    config.write_text(
        f'topology_file = "{topology}"\n[[policy.nodes]]\ngroups = ["r12"]\naction = "drain_node"\n'
        "[policy]\nmode = 'act'\n"
    )
    assert main(["policy", "test", written(tmp_path, 'kind = "drain_node"'), "--config", str(config)]) == 0
    assert "drain_node in place of exclude_node for gpu_lost on n1 (policy.nodes[0])" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expect", "more", "said"),
    [
        ("", "", "case[0].expect: expects nothing"),
        ('rule = "blnid"', "", "unknown rule 'blnid'; expected one of fault, node_terms, accused"),
        ('kind = "reboot"', "", "'exclude_node'"),
        ('rule = ""', "polcy = {}", "`polcy`, known here are name, incident, expect"),
        (
            'rule = ""',
            'policy = { nodes = [{ groups = ["r12"], action = "notify" }] }',
            "case[0].policy.nodes[0].groups: expected groups of case[0].policy.node_groups or racks, got 'r12'",
        ),
        ('rule = ""', 'policy = { mode = "dare" }', "case[0].policy: Invalid enum value 'dare'"),
        ('rule = ""', "actions = [{ kind = 'restart_job', age_s = -1 }]", "case[0].actions[0].age_s"),
    ],
)
def test_a_mistake_is_wrong_usage_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expect: str, more: str, said: str
) -> None:
    assert main(["policy", "test", written(tmp_path, expect, more)]) == 2
    assert said in capsys.readouterr().err
