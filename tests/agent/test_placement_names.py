from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.processes.environment import (
    Gpus,
    gpus,
    job_of,
    listed_device,
    name_conflicts,
    named_device,
    node_names,
    same_node,
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("n1", "N1", True),
        ("n1", "n1.example.org", True),
        ("n1.example.org.", "n1.example.org", True),
        ("n1.a.org", "n1.b.org", False),
        ("n1", "n10", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "10", False),
        ("", "", False),
        ("", ".org", False),
    ],
)
def test_which_names_mean_one_node(one: str, other: str, same: bool) -> None:
    assert same_node(one, other) == same
    assert same_node(other, one) == same


def test_all_names_of_a_node_are_listed_and_those_that_disagree_are_named() -> None:
    environ = {"SLURMD_NODENAME": "gpu-3", "NODE_NAME": "n1.internal", "EAGLE_EYE_NODE": "n1", "OTHER": "x"}
    names = node_names("n1", "n1", "n1.example.org", environ, pod=True)
    assert [name.name for name in names] == ["n1", "n1", "n1.example.org", "gpu-3", "n1", "n1.internal"]
    assert name_conflicts(names) == ["Slurm (SLURMD_NODENAME) calls this node 'gpu-3', the agent 'n1'"]


def test_a_pod_s_variable_means_nothing_outside_a_pod() -> None:
    assert len(node_names("n1", "", "", {"NODE_NAME": "builder"}, pod=False)) == 1


def test_a_name_that_is_none_is_left_out() -> None:
    assert len(node_names("n1", "a\nb", "x" * 254, {}, pod=False)) == 1


def test_the_link_to_the_current_cycle_names_the_job() -> None:
    assert job_of("/lustre/nvrx/cycle_info.my.job.current") == "my.job"
    assert job_of("cycle_info.70.current") == "70"
    assert job_of("/lustre/nvrx/cycle_info.70.1.4") == ""


A = "GPU-aaaa1111-0000-0000-0000-000000000001"
B = "GPU-aaaa2222-0000-0000-0000-000000000002"
MIG = "MIG-cccc3333-0000-0000-0000-000000000003"
# NVML's indexes are not in the order of the bus here.
NODE = gpus({A: 1, B: 0, MIG: 7}, {"00000000:1B:00.0": 1, "00000000:3B:00.0": 0})
UNKNOWN = Gpus({}, ())


@pytest.mark.parametrize(
    ("text", "device"),
    [(A, 1), (A.lower(), 1), ("GPU-aaaa2", 0), ("GPU-aaaa", None), (MIG, 7), (f"MIG-{A}/3/0", 1), ("0", None)],
)
def test_the_only_gpu_by_its_name(text: str, device: int | None) -> None:
    assert named_device({"CUDA_VISIBLE_DEVICES": text}, NODE) == device


def test_of_several_gpus_none_is_the_only_one() -> None:
    assert named_device({"CUDA_VISIBLE_DEVICES": f"{A},{B}"}, NODE) is None
    assert named_device({}, NODE) is None


@pytest.mark.parametrize(
    ("environ", "local_rank", "device"),
    [
        ({}, 1, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, 1),  # the bus's first GPU is NVML's second
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 5, 0),
        ({"CUDA_VISIBLE_DEVICES": f"{B},{A}"}, 1, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1, 1),  # CUDA stops at what is no device
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ffff"}, 0, None),
        ({"NVIDIA_VISIBLE_DEVICES": B}, 0, 0),
        ({"NVIDIA_VISIBLE_DEVICES": f"{B},{A}"}, 0, 1),  # a container sees its GPUs in the order of the bus
        ({"NVIDIA_VISIBLE_DEVICES": f"{B},{A}", "CUDA_VISIBLE_DEVICES": "1"}, 0, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 0, None),
        ({"NVIDIA_VISIBLE_DEVICES": "99"}, 0, None),
        ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}, 0, 0),  # devices are constrained
        ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}, 0, 0),  # they are not
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, 0, 0),
    ],
)
def test_the_gpu_of_a_rank_among_those_that_it_sees(environ: dict[str, str], local_rank: int, device: int) -> None:
    assert listed_device(environ, local_rank, NODE) == device


def test_slurm_s_numbers_that_can_be_read_two_ways_tell_nothing() -> None:
    assert listed_device({"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, 0, UNKNOWN) is None
    assert listed_device({"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, 1, UNKNOWN) == 5


def test_without_nvml_an_index_is_the_row() -> None:
    assert listed_device({"CUDA_VISIBLE_DEVICES": "6,7"}, 1, UNKNOWN) == 7
    assert listed_device({"CUDA_VISIBLE_DEVICES": A}, 0, UNKNOWN) is None


@given(
    st.dictionaries(
        st.sampled_from(["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"]),
        st.one_of(st.text(max_size=40), st.lists(st.sampled_from(["0", "1", "-1", A, MIG, "GPU-"])).map(",".join)),
    ),
    st.integers(0, 9),
)
def test_any_text_is_a_row_of_the_node_or_none(environ: dict[str, str], local_rank: int) -> None:
    assert named_device(environ, NODE) in (None, 0, 1, 7)
    assert listed_device(environ, local_rank, NODE) in (None, 0, 1, 7)
