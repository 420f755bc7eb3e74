"""``eagle-eye plan``: what it says to people and to programs, what it draws, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.cli.main import main
from eagle_eye.planning.files import read_plan
from eagle_eye.planning.plan import variable
from tests.planning.jobs import document, written

JOB = ("--gpu-memory", "60GiB", "--global-batch", "64")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, document(24))


@pytest.fixture
def plan(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", "--profile", profile, "--nodes", "5", *JOB, "--json"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    return str(file)


def reported(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["plan", *words]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(["plan", *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.strip()


def test_people_are_told_templates_layouts_and_what_follows_a_loss(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = reported(capsys, "--profile", profile, "--nodes", "5", *JOB)
    assert lines[0] == "24 layers on 5 nodes of 1 GPU with 60.0 GiB; 64 micro-batches of 1 in a step"
    assert lines[1] == "2 nodes hold the model; with 4 or more any 1 may go at once, and a whole copy is left in memory"
    rows = lines[lines.index("layouts") + 2 :]
    assert [row.split()[0] for row in rows[:4]] == ["5", "4", "3", "2"]
    assert rows[1].startswith("4 2 x 2 2x32 ")
    assert rows[1].endswith(" tolerates 1 more at once")
    assert rows[2].endswith("no further loss tolerated")
    losses = lines[lines.index("when one of 5 nodes goes") + 2 :]
    assert [row.split()[0] for row in losses] == ["n1", "n2", "n3", "n4", "n5"]


def test_programs_get_the_plan_that_is_read_again(plan: str) -> None:
    read = read_plan(Path(plan))
    assert read.nodes == ("n1", "n2", "n3", "n4", "n5")
    assert [template.nodes for template in read.templates] == [2, 3]
    assert [layout.nodes for layout in read.layouts] == [2, 3, 4, 5]
    assert (read.micro_batches, read.nodes_min, read.device) == (64, 2, "H100")


def test_a_plan_says_for_which_job_it_is(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", profile, "--nodes", "3", *JOB, "--job", "llm7b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "llm7b"


def test_nodes_are_named_as_slurm_writes_them(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", profile, "--nodes", "gpu[08-10]", *JOB, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == ["gpu08", "gpu09", "gpu10"]


def test_of_a_lost_node_people_are_told_who_gets_what_from_whom(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = reported(capsys, "lost", "n2", "--plan", plan)
    assert lines[0].startswith("n2 goes: 2 x 2, ")
    assert any(" gets layer" in line for line in lines)
    assert not any(line.startswith("n2 gets") or "from n2:" in line for line in lines)


def test_a_lost_nodes_answer_is_what_the_next_one_begins_with(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    def lost(*words: str) -> dict[str, Any]:
        assert main(["plan", "lost", *words, "--plan", plan, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    first = lost("n2")
    assert sorted(first["nodes"]) == ["n1", "n3", "n4", "n5"]
    second = lost("n5", "--nodes", ",".join(first["nodes"]))
    assert sorted(second["nodes"]) == ["n1", "n3", "n4"]
    assert second["layout"]["nodes"] == 3
    assert all(copy["from"] in first["nodes"] for copy in second["copies"])


def test_below_the_fewest_nodes_the_job_is_said_to_wait_for_a_spare(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "lost", "n1", "--plan", plan, "--nodes", "n1,n4", code=1)
    assert said == "eagle-eye plan: no layout for 1 node: the model needs 2; the job waits for a spare"


def test_a_script_gets_the_layout_of_the_nodes_that_it_has(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    for nodes, ranks in (("3", 3), ("gpu[4-7]", 4)):
        assert main(["plan", "layout", "--plan", plan, "--nodes", nodes]) == 0
        assert capsys.readouterr().out == variable(read_plan(Path(plan)), ranks) + "\n"


def test_a_script_gets_no_layout_of_another_job_or_of_too_few_nodes(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile", profile, "--nodes", "3", *JOB, "--job", "llm7b", "--json"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    words = ("layout", "--plan", str(file), "--nodes")
    assert main(["plan", *words, "3", "--job", "llm7b"]) == 0
    capsys.readouterr()
    assert "it is the plan of job 'llm7b', not of 'other'" in refused(capsys, *words, "3", "--job", "other")
    assert "for other hardware: GPUs of a node 1, not 8" in refused(capsys, *words, "3", "--gpus-per-node", "8")
    assert "the job waits for a spare" in refused(capsys, *words, "1", code=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus-per-node", "8"), "--plan: it is for other hardware: GPUs of a node 1, not 8"),
        (("--gpu-memory", "40GiB"), "not 42949672960; plan again"),
        (("--gpu-memory", "much"), "--gpu-memory: expected a size"),
        (("--nodes", "n7,n8"), "node 'n1' is none of the 2 nodes that train"),
        (("--nodes", "n[1-9]"), "no layout for 9 nodes: the plan is for 5 at most"),
        (("--nodes", "n1,n1"), "--nodes: n1 is named 2 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_plan_is_refused_for_what_it_is_not_for(
    plan: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code = 1 if said.startswith("no layout") else 2
    assert said in refused(capsys, "lost", "n1", "--plan", plan, *words, code=code)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", "eagle-eye-plan/9", "eagle-eye-plan/9"),
        ("layouts", [], "layouts: expected one for each number of nodes"),
        ("templates", [], "templates: expected one for each number of nodes"),
        ("nodes", ["n1"], "nodes: expected 5 names, each once"),
        ("global_batch", 63, "its pipelines do not run 63 micro-batches"),
        ("micro_batch", 0, "global_batch: 64 is no multiple of micro_batch, 0"),
    ],
)
def test_a_plan_whose_parts_do_not_fit_is_refused(
    plan: str, capsys: pytest.CaptureFixture[str], key: str, value: object, said: str
) -> None:
    document = json.loads(Path(plan).read_text())
    Path(plan).write_text(json.dumps({**document, key: value}))
    assert said in refused(capsys, "lost", "n1", "--plan", plan)


def test_survivors_of_whom_one_is_lost_are_refused(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(Path(plan).read_text())
    document["layouts"][-1]["losses"][0]["survivors"] = [0, 1, 2, 3]
    Path(plan).write_text(json.dumps(document))
    assert "layout for 5 nodes: survivors: expected its other 4 places" in refused(capsys, "lost", "n1", "--plan", plan)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "0"), "--nodes: expected 1 to 256, got 0"),
        (("--nodes", "n1,n1"), "--nodes: n1 is named 2 times"),
        (("--nodes", "1"), "--nodes: the model needs"),
        (("--gpus-per-node", "0"), "--gpus-per-node: expected 1 to 64, got 0"),
        (("--gpus-per-node", "4", "--gpus-per-stage", "3"), "--gpus-per-stage: expected a divisor of the 4 GPUs"),
        (("--gpu-memory", "0"), "--gpu-memory: expected 1 byte or more"),
        (("--gpu-memory", "2GiB"), "layer 0 alone needs"),
        (("--tolerate", "-1"), "--tolerate: expected 0 to 64, got -1"),
        (("--global-batch", "0"), "--global-batch: expected a multiple of"),
        (("--global-batch", "1"), "--global-batch: expected 2 to 16384 micro-batches"),
        (("--micro-batch", "4"), "--micro-batch: the profile was measured with 1 samples, not 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_planned_is_refused_by_its_flag(
    profile: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    given = {"--profile": profile, "--nodes": "5", **dict(zip(JOB[::2], JOB[1::2], strict=True))}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    assert said in refused(capsys, *(word for pair in given.items() for word in pair))


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--profile, --gpu-memory, --global-batch: needed, to plan" in refused(capsys, "--nodes", "5")


def test_a_picture_that_cannot_be_written_is_an_error(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--profile", profile, "--nodes", "5", *JOB, "--svg", str(tmp_path / "missing" / "step.svg"))
    assert "--svg: " in refused(capsys, *words)


def test_planning_needs_no_torch(profile: str) -> None:
    code = (
        "import sys; from eagle_eye.cli.main import main;"
        f"code = main(['plan', '--profile', {profile!r}, '--nodes', '4', '--gpu-memory', '60GiB', '--global-batch',"
        " '8']); sys.exit(code or 3 * bool({'torch', 'numpy', 'scipy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
