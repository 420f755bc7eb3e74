"""Policy's settings as an operator writes them: what is refused, and which of several counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from eagle_eye.schema.configuration import ConfigurationError, masked
from eagle_eye.server.config import ServerConfig, load
from eagle_eye.server.engine.settings import JobTerms, Maintenance, PolicySettings, in_force, moment

WRITTEN = """
[policy]
mode = "act"
[[policy.modes]]
jobs = ["big-*"]
kinds = ["exclude_node"]
mode = "approve"
[[policy.jobs]]
jobs = ["big-1"]
spares = 2
may_restart = false
[[policy.maintenance]]
from = 2026-03-01T02:00:00+01:00
until = 2026-03-01T03:00:00Z
nodes = ["rack7-*"]
"""


def loaded(folder: Path, text: str) -> ServerConfig:
    file = folder / "server.toml"
    file.write_text(text)
    return load(file, {}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[policy.modes]]\nmode = "act"', r"policy\.modes\[0\]: names no jobs, faults or kinds"),
        ('[[policy.modes]]\njobs = ["a"]\nmode = "dare"', r"policy\.modes\[0\]\.mode: .*'observe', 'approve', 'act'"),
        ('[[policy.modes]]\nfaults = ["hnag"]\nmode = "act"', "unknown fault 'hnag'.*network_hang"),
        ('[[policy.modes]]\nkinds = ["reboot"]\nmode = "act"', r"kinds\[0\]: .*'exclude_node'"),
        ('[[policy.jobs]]\njobs = ["a"]\nspare = 1', r"policy\.jobs\[0\]: .*`spare`, known here are jobs, may_restart"),
        ("[[policy.jobs]]\nspares = 1", r"policy\.jobs\[0\]: .*`jobs`"),
        ('[[policy.nodes]]\naction = "notify"', r"policy\.nodes\[0\]: names no nodes, groups or gpu_models"),
        ('[[policy.nodes]]\nnodes = ["a"]', r"policy\.nodes\[0\]: settles nothing; give one of action, confidence_min"),
        ('[[policy.nodes]]\nnodes = ["a"]\naction = "reboot"', r"policy\.nodes\[0\]\.action: .*'drain_node'"),
        ('[[policy.nodes]]\nnodes = ["a"]\nconfidence_min = 2', r"policy\.nodes\[0\]\.confidence_min"),
        (
            '[[policy.nodes]]\nnodes = ["a"]\nfaults = ["hnag"]\naction = "notify"',
            "unknown fault 'hnag'.*network_hang",
        ),
        ("[policy.node_groups]\nlent = []", r"policy\.node_groups.*length >= 1"),
        (
            '[[policy.nodes]]\ngroups = ["lend"]\naction = "notify"\n[policy.node_groups]\nlent = ["a*"]',
            r"policy\.nodes\[0\]\.groups: .*'lend'.*no topology_file names racks; did you mean lent\?",
        ),
        ("[[policy.maintenance]]\nfrom = 2026-03-01T02:00:00\nuntil = 0", "offset from UTC, such as 2026"),
        (
            "[[policy.maintenance]]\nfrom = 2026-03-01\nuntil = 0",
            r"policy\.maintenance\[0\]\.from: expected a date-time",
        ),
        ("[[policy.maintenance]]\nfrom = 10\nuntil = 10", "is not after from"),
        ("[[policy.maintenance]]\nfrom = 10\nuntil = inf", r"policy\.maintenance\[0\]\.until: .*253402300799"),
        ("[policy]\nbreaker_actions = 0", "policy.breaker_actions"),
    ],
)
def test_an_error_names_the_key_and_what_was_expected(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        loaded(tmp_path, text)


RACK = '[[policy.nodes]]\ngroups = ["r12"]\naction = "drain_node"\n'


def with_topology(folder: Path, text: str) -> str:
    file = folder / "topology.json"
    file.write_text('{"rack_of_node": {"n2": "r12", "n3": "r13", "n1": "r12"}}')
    return f'topology_file = "{file}"\n{text}'


def test_a_rack_of_the_topology_file_is_a_group(tmp_path: Path) -> None:
    config = loaded(tmp_path, with_topology(tmp_path, RACK))
    assert config.policy.node_groups == {"r12": ["n1", "n2"]}
    assert loaded(tmp_path, tomli_w.dumps(masked(config))) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            RACK.replace("r12", "r122"),
            r"policy\.nodes\[0\]\.groups: .*'r122'.*no rack of topology_file; did you mean r12",
        ),
        (f'{RACK}[policy.node_groups]\nr12 = ["n3"]', r"policy\.node_groups\.r12: .*a rack of this name"),
    ],
    ids=["no-such-rack", "two-of-one-name"],
)
def test_a_group_that_no_rack_is_or_another_rack_is_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        loaded(tmp_path, with_topology(tmp_path, text))


def test_a_topology_file_that_is_none_is_refused_with_an_example_that_is_one(tmp_path: Path) -> None:
    text = with_topology(tmp_path, RACK)
    file = tmp_path / "topology.json"
    file.write_text("[]")
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, text)
    file.write_text(str(refused.value).partition("; expected ")[2])
    assert loaded(tmp_path, text).policy.node_groups == {"r12": ["n1"]}


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    config = loaded(tmp_path, WRITTEN)
    assert config.policy.maintenance[0].from_s + 2 * 3600 == config.policy.maintenance[0].until_s
    assert loaded(tmp_path, tomli_w.dumps(masked(config))) == config


def test_lists_of_settings_can_come_from_the_environment() -> None:
    environ = {"EAGLE_EYE_POLICY_MODES": '[{"jobs": ["a"], "mode": "act"}]'}
    assert load(None, environ, {}).policy.modes[0].jobs == ["a"]


def test_a_job_named_in_full_comes_before_a_pattern_and_among_equals_the_more_careful_counts() -> None:
    terms = [
        JobTerms(jobs=["a*"], spares=5, nodes_min=4, restart_owner="slurm"),
        JobTerms(jobs=["*"], spares=1, nodes_min=9, restart_owner="eagle-eye"),
        JobTerms(jobs=["a1"], nodes_min=2),
    ]
    for order in (terms, terms[::-1]):
        found = PolicySettings(jobs=order).for_job("a1")
        assert (found.spares, found.nodes_min, found.restart_owner, found.may_restart) == (1, 2, "slurm", True)


def test_a_window_is_open_from_its_beginning_until_before_its_end() -> None:
    window = Maintenance(from_s=10.0, until_s=20.0)
    assert [in_force([window], "j", [], now_s) is not None for now_s in (9.9, 10.0, 19.9, 20.0)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("jobs", "nodes", "concerns"),
    [
        ([], [], True),
        (["j"], [], True),
        (["k"], [], False),
        ([], ["n*"], True),
        ([], ["m*"], False),
        (["k"], ["n1"], True),
    ],
)
def test_a_window_concerns_its_jobs_and_its_nodes(jobs: list[str], nodes: list[str], concerns: bool) -> None:
    window = Maintenance(from_s=0.0, until_s=20.0, jobs=jobs, nodes=nodes)
    assert (in_force([window], "j", ["n1", "n2"], 1.0) is not None) is concerns


def test_moments_are_written_as_everywhere_else() -> None:
    assert moment(1_772_330_400.9) == "2026-03-01T02:00:00Z"
