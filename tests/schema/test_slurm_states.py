"""What Slurm's names of states mean: each of them, those that the installed Slurm knows, and to both who read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.slurm import answers as orchestrators
from eagle_eye.schema import slurm
from eagle_eye.schema.slurm import JobPhase, read_job, read_node, state_names
from eagle_eye.server.jobs import slurm_answers as servers

JOB_NAMES = {
    *slurm.JOB_BASE_STATES,
    *slurm.JOB_DECIDING_FLAGS,
    *slurm.JOB_FLAGS_OF_ALLOCATED,
    *slurm.JOB_OTHER_FLAGS,
}
NODE_NAMES = {*slurm.NODE_BASE_STATES, *slurm.NODE_FLAGS, *slurm.NODE_ALIASES}
BASES = sorted(slurm.JOB_BASE_STATES)
ENDED = ("cancelled", "preempted", "timeout", "failed", "finished")

ALONE: dict[str, str] = {
    "pending": "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING",
    "configuring": "CONFIGURING POWER_UP_NODE",
    "running": "RUNNING RESIZING SIGNALING",
    "suspended": "SUSPENDED STOPPED",
    "completing": "COMPLETING STAGE_OUT",
    "cancelled": "CANCELLED REVOKED",
    "preempted": "PREEMPTED",
    "timeout": "TIMEOUT DEADLINE",
    "failed": "FAILED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL",
    "finished": "COMPLETED",
    "unknown": "LAUNCH_FAILED RECONFIG_FAIL UPDATE_DB BRAND_NEW",
}


def test_every_name_of_a_jobs_state_has_its_meaning_alone() -> None:
    said = {name: phase for phase, names in ALONE.items() for name in names.split()}
    assert {name: read_job([name]).phase for name in said} == said
    assert said.keys() - {"BRAND_NEW"} == JOB_NAMES


@pytest.mark.parametrize(
    ("names", "phase", "completing"),
    [
        ("FAILED COMPLETING", "failed", True),
        ("CANCELLED COMPLETING", "cancelled", True),
        ("COMPLETED STAGE_OUT", "finished", True),
        ("RUNNING COMPLETING", "completing", True),
        ("PENDING COMPLETING", "pending", True),
        ("COMPLETING", "completing", True),
        ("NODE_FAIL REQUEUED", "pending", False),
        ("PREEMPTED REQUEUED COMPLETING", "pending", True),
        ("RUNNING CONFIGURING", "configuring", False),
        ("RUNNING CONFIGURING POWER_UP_NODE", "configuring", False),
        ("CANCELLED CONFIGURING", "cancelled", False),
        ("RUNNING STOPPED", "suspended", False),
        ("RUNNING SIGNALING", "running", False),
        ("PENDING SIGNALING", "pending", False),
        ("PENDING EXPEDITING", "pending", False),
        ("PENDING LAUNCH_FAILED", "pending", False),
        ("RUNNING UPDATE_DB", "running", False),
        ("PENDING REVOKED", "cancelled", False),
    ],
)
def test_names_of_a_job_together(names: str, phase: str, completing: bool) -> None:
    assert read_job(names.split()) == (phase, completing)


@pytest.mark.parametrize("names", [["RUNNING"], ["RUNNING", "CONFIGURING"], ["COMPLETING"]])
def test_a_job_that_slurm_has_asked_to_leave_is_preempted(names: list[str]) -> None:
    assert read_job(names, preempted=True).phase == "preempted"


def test_a_job_that_ended_by_itself_in_its_grace_time_was_not_preempted() -> None:
    assert read_job(["FAILED"], preempted=True).phase == "failed"


@pytest.mark.parametrize("base", BASES)
def test_a_flag_that_is_not_known_changes_nothing_beside_a_base_state(base: str) -> None:
    assert read_job([base, "BRAND_NEW"]) == read_job([base])


@given(st.lists(st.sampled_from(sorted({*JOB_NAMES - {*BASES}, "BRAND_NEW"})), max_size=4))
def test_a_job_without_a_known_base_state_never_counts_as_running_once_a_name_is_not_known(flags: list[str]) -> None:
    assert read_job(["NEWER_THAN_US", *flags]).phase != "running"
    assert read_job(["NEWER_THAN_US"]).phase == "unknown"


NODES: dict[str, str] = {
    "free": "IDLE NOT_RESPONDING NO_RESPOND POWERED_DOWN POWERING_UP POWER_UP POW_UP REBOOT_REQUESTED REBOOT BOOT"
    " REBOOT_CANCELED CANCEL_REBOOT MAINTENANCE MAINT RESERVED RESV PLANNED PLND CLOUD DYNAMIC DYNAMIC_FUTURE"
    " DYNAMIC_NORM EXTERNAL RESUME RESM UNDRAIN",
    "busy": "ALLOCATED ALLOC MIXED MIX COMPLETING COMP PERFCTRS NPC",
    "away": "BLOCKED BLOCK POWER_DOWN POW_DN POWER_DRAIN POWERING_DOWN REBOOT_ISSUED",
    "drained": "DRAIN DRAINED FAIL",
    "draining": "DRAINING DRNG FAILING FAILG",
    "down": "DOWN ERROR FUTURE FUTR INVALID_REG INVAL",
    "unknown": "UNKNOWN UNK INVALID BRAND_NEW",
}


def standing(names: Collection[str]) -> str:
    node = read_node(names)
    if node.drained:
        return "draining" if node.busy else "drained"
    if node.down or not node.known:
        return "down" if node.down else "unknown"
    assert node.usable
    return "free" if node.free else "busy" if node.busy else "away"


def test_every_name_of_a_nodes_state_has_its_meaning_alone() -> None:
    said = {name: meaning for meaning, names in NODES.items() for name in names.split()}
    assert {name: standing([name]) for name in said} == said
    assert said.keys() - {"BRAND_NEW"} == NODE_NAMES


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("idle", "free"),
        ("idle*", "free"),
        ("IDLE+NOT_RESPONDING", "free"),
        ("allocated*", "busy"),
        ("idle~", "free"),
        ("idle+cloud+powered_down", "free"),
        ("idle%", "away"),
        ("mixed-", "busy"),
        ("allocated+", "busy"),
        ("allocated+drain", "draining"),
        ("idle+drain", "drained"),
        ("idle+drain+blocked", "drained"),
        ("drained*", "drained"),
        ("down+drain+reboot_issued", "drained"),
        ("idle+reboot_issued", "away"),
        ("reboot^", "away"),
        ("down*", "down"),
        ("down+powered_down", "down"),
        ("idle+invalid_reg", "down"),
        ("future", "down"),
        ("unknown*", "unknown"),
        ("unknown+cloud", "unknown"),
        ("unknown+drain", "drained"),
        ("idle+brand_new", "free"),
        ("brand_new+cloud", "unknown"),
        ("?", "unknown"),
    ],
)
def test_names_of_a_node_together(state: str, meaning: str) -> None:
    assert standing(state_names(state)) == meaning


def test_a_node_in_a_maintenance_reservation_is_known_as_that() -> None:
    assert [read_node(state_names(said)).maintenance for said in ("idle$", "allocated+maint", "idle")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("mixed+drain", ("MIXED", "DRAIN")),
        ("idle~*", ("IDLE", "POWERED_DOWN", "NOT_RESPONDING")),
        (["RUNNING", "COMPLETING"], ("RUNNING", "COMPLETING")),
        (["RUNNING", 3, None, "?"], ("RUNNING",)),
        ("", ()),
        (None, ()),
        ({"RUNNING": 1}, ()),
        (["IDLE"] * 99, ("IDLE",) * slurm.NAMES_MAX),
    ],
)
def test_the_names_in_a_state(said: object, names: tuple[str, ...]) -> None:
    assert state_names(said) == names


def jobs_json(names: Collection[str]) -> str:
    job = {"job_id": 17, "job_state": list(names), "restart_cnt": 0, "requeue": True, "batch_flag": True, "priority": 1}
    return json.dumps({"jobs": [job]})


@pytest.mark.parametrize("base", ["BRAND_NEW", *BASES])
def test_the_server_and_the_orchestrator_read_a_job_alike(base: str) -> None:
    renamed: dict[JobPhase, str] = {"configuring": "pending", "unknown": ""}
    for flag in ("BRAND_NEW", *JOB_NAMES):
        text = jobs_json([base, flag])
        (theirs,) = orchestrators.jobs_of_json(text)
        (ours,) = servers.jobs_of_json(text.encode(), Counter())
        assert ours.state == renamed.get(theirs.phase, theirs.phase), flag


@pytest.mark.parametrize("base", ["BRAND_NEW", *sorted(slurm.NODE_BASE_STATES)])
def test_the_server_and_the_orchestrator_read_a_node_alike(base: str) -> None:
    for flag in ("BRAND_NEW", *slurm.NODE_FLAGS):
        (theirs,) = orchestrators.nodes_of_text(f"n1|{base}+{flag}|all|")
        (ours,) = servers.nodes_of_text(f"n1|{base}+{flag}|none|".encode(), Counter())
        assert (ours.state == "in_service", ours.drained) == (theirs.usable, theirs.drained), flag
        assert (ours.state in ("excluded", "draining")) == (theirs.drained or theirs.down), flag


def accepted(folder: Path, program: str) -> set[str]:
    """Return the names that the program takes after --states; it lists them when given another, and asks nobody."""
    conf = folder / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nNodeName=n1\nPartitionName=all Nodes=ALL\n")
    environ = {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)}
    command = [program, "--states=no_such_state"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=20).stderr
    (names,) = re.findall(r"(?i)valid (?:job )?states(?: include)?: (.+)", said)
    return {name for part in names.split(",") for name in state_names(part)}


@pytest.mark.parametrize(("program", "known"), [("squeue", JOB_NAMES), ("sinfo", NODE_NAMES)])
def test_every_state_that_the_installed_commands_take_is_known(tmp_path: Path, program: str, known: set[str]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install $(cat tests/debian-packages.txt)")
    names = accepted(tmp_path, program)
    assert len(names) > 15
    assert names <= known


# In a process of its own: the library is Slurm's whole inside.
NAMES_OF_LIBRARY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for function in sys.argv[2:]:
    name = getattr(library, function)
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_uint32]
    for base in range(16):
        for state in (base, *(base | 1 << bit for bit in range(4, 32))):
            print((name(state) or b"").decode())
"""
FUNCTIONS_OF_NODES = [f"slurm_node_state_string{form}" for form in ("", "_compact", "_complete")]


@pytest.mark.parametrize(
    ("functions", "known"),
    [(["slurm_job_state_string"], JOB_NAMES), (FUNCTIONS_OF_NODES, NODE_NAMES)],
    ids=["jobs", "nodes"],
)
def test_every_state_that_the_installed_slurmctld_can_write_is_known(functions: list[str], known: set[str]) -> None:
    """Its library is asked for the name of every number that a state can be: slurmctld's, squeue's and sinfo's own."""
    found = [*Path("/usr").glob("lib/*/slurm*/libslurmfull.so"), *Path("/usr").glob("lib64/slurm/libslurmfull.so")]
    if not found:
        pytest.skip("Slurm is not installed: apt-get install $(cat tests/debian-packages.txt)")
    command = [sys.executable, "-c", NAMES_OF_LIBRARY, str(found[0]), *functions]
    written = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    names = {name for state in written.splitlines() for name in state_names(state)}
    assert len(names) > 15
    assert names <= known
