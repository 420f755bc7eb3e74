"""XIDs whose harm only the job tells: links and GPUs that need a reset, what is in no catalogue, and who was first."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.detectors.hardware.device_errors import DeviceErrors
from eagle_eye.detectors.hardware.early_signs import EarlySigns
from eagle_eye.detectors.signs.gpu_errors import gpu_errors
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.driver_facts import BY_CODE, LAST_CODE, is_fatal
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=10, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
DEVICES, EARLY = DeviceErrors(patience=PATIENCE), EarlySigns()
FATAL = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 07 (0x024505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
NONFATAL = "RLW_RXPIPE Nonfatal XC0 i0 Link 12 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)"
ECHO = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
LINKS = [(74, "NVLink: fatal error detected on link 3"), (136, ""), (155, ""), *((c, FATAL) for c in range(144, 151))]
RESETS = [151, 156, 158, 167, 173]


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def job(rows: int = 0) -> Story:
    story = Story(gpus=2).complete()
    return story.standstill(rows) if rows else story


def crashed(story: Story, before_s: float, *nodes: str) -> Story:
    for node in nodes or story.nodes:
        story.happened("process_exit", node, before_s, 0, exit_code=1)
        story.happened("training_error", node, before_s, 0, text=ECHO)
    return story


class TestBesideAStop:
    @pytest.mark.parametrize(("code", "text"), [*LINKS, *((code, "") for code in RESETS)])
    def test_a_fatal_error_before_the_standstill_excludes_its_node(self, code: int, text: str) -> None:
        verdict = only(DEVICES.detect(job(20).happened("xid", "n1", 20.5, 1, code=code, text=text).window()))
        assert (verdict.fault, verdict.node, verdict.device, verdict.asks) == ("gpu_hang", "n1", 1, None)
        assert verdict.fact
        assert verdict.kinds == {"xid", "standstill"}

    @pytest.mark.parametrize(("code", "text"), [*LINKS, *((code, "") for code in RESETS)])
    def test_so_does_one_before_the_ranks_end(self, code: int, text: str) -> None:
        story = crashed(job().happened("xid", "n2", 6, 0, code=code, text=text), 3)
        verdict = only(DEVICES.detect(story.window()))
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert "exit" in verdict.kinds

    @pytest.mark.parametrize("code", [13, 31, 43, 45, 32, 69, 63, 92, 121, 137, 999])
    def test_what_programs_cause_or_what_cleans_up_accuses_nobody(self, code: int) -> None:
        story = crashed(job().happened("xid", "n2", 6, 0, code=code), 3)
        assert DEVICES.detect(story.window()) == []

    @pytest.mark.parametrize("text", [NONFATAL, ""])
    @pytest.mark.parametrize("code", range(144, 151))
    def test_an_nvlink_5_error_that_is_not_said_to_be_fatal_accuses_nobody(self, code: int, text: str) -> None:
        story = crashed(job().happened("xid", "n2", 6, 0, code=code, text=text), 3)
        assert DEVICES.detect(story.window()) == []

    def test_an_error_after_the_first_end_is_its_echo(self) -> None:
        story = crashed(job(), 20).happened("xid", "n2", 10, 0, code=74)
        assert DEVICES.detect(story.window()) == []

    def test_an_error_late_in_a_standstill_did_not_begin_it(self) -> None:
        assert DEVICES.detect(job(50).happened("xid", "n1", 2, 0, code=74).window()) == []

    def test_an_error_that_the_job_outlived_did_not_stop_it(self) -> None:
        assert DEVICES.detect(job(20).happened("xid", "n1", 50, 0, code=74).window()) == []

    def test_a_death_of_its_own_elsewhere_is_nearer_than_an_error_of_a_minute_ago(self) -> None:
        story = job().happened("xid", "n1", 40, 0, code=74)
        story.happened("process_exit", "n3", 3, 0, exit_code=-11).happened("process_exit", "n1", 3, 0, exit_code=1)
        assert DEVICES.detect(story.window()) == []

    def test_a_driver_that_asks_for_nothing_is_believed(self) -> None:
        none = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
        story = job().happened("xid", "n1", 6, 0, code=158).happened("xid", "n1", 5, 0, code=154, text=none)
        assert DEVICES.detect(crashed(story, 3).window()) == []

    def test_a_pause_is_given_its_time(self) -> None:
        assert DEVICES.detect(job(5).happened("xid", "n1", 5, 0, code=74).window()) == []


class TestWhoWasFirst:
    def two(self, first_s: float, second_s: float, nodes: int = 4) -> Story:
        story = Story(nodes=nodes, gpus=2).complete().standstill(20)
        return story.happened("xid", "n2", first_s, 0, code=149, text=FATAL).happened(
            "xid", "n1", second_s, 1, code=149, text=FATAL
        )

    def test_the_earliest_node_is_the_cause_and_the_other_end_is_named(self) -> None:
        verdict = only(DEVICES.detect(self.two(21, 20.5).window()))
        assert (verdict.node, verdict.nodes) == ("n2", ("n2",))
        assert "other end may be to blame (n1)" in verdict.summary

    def test_of_many_at_one_moment_nobody_is_accused(self) -> None:
        assert DEVICES.detect(self.two(21, 20.5).happened("xid", "n3", 20.6, 0, code=74).window()) == []

    def test_one_that_was_clearly_first_of_many_is(self) -> None:
        story = self.two(25, 20.5).happened("xid", "n3", 20.6, 0, code=74)
        assert only(DEVICES.detect(story.window())).node == "n2"


class TestWhileTheJobGoesOn:
    @pytest.mark.parametrize("code", RESETS)
    def test_a_gpu_that_needs_a_reset_is_drained(self, code: int) -> None:
        verdict = only(DEVICES.detect(job().happened("xid", "n1", 30, 0, code=code).window()))
        assert (verdict.node, verdict.asks) == ("n1", "drain_node")

    @pytest.mark.parametrize("code", [74, 149, 155])
    def test_links_are_left_to_their_own_detector(self, code: int) -> None:
        assert DEVICES.detect(job().happened("xid", "n1", 30, 0, code=code, text=FATAL).window()) == []

    def test_a_gpu_that_no_rank_uses_is_not_the_jobs(self) -> None:
        story = Story(gpus=1).complete().happened("xid", "n1", 30, 5, code=158)
        assert DEVICES.detect(story.window()) == []


class TestCatalogue:
    def test_every_code_of_the_catalogue_that_is_in_use_is_known(self) -> None:
        unused = {*range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), *range(33, 37), 42, 47, *range(49, 54)}
        unused |= {*range(55, 60), 61, 65, 73, 81, 87, 90, 91, *range(111, 119), *range(122, 126), 138}
        assert set(BY_CODE) == set(range(1, LAST_CODE + 1)) - unused

    @pytest.mark.parametrize("code", [51, 174, 4711])
    def test_an_unknown_code_is_reported_and_asks_for_nothing(self, code: int) -> None:
        verdict = only(EARLY.detect(job().happened("xid", "n1", 5, 1, code=code).window()))
        assert (verdict.fault, verdict.node, verdict.device, verdict.asks) == ("host_errors", "n1", 1, "notify")
        assert f"XID {code}" in verdict.summary

    @pytest.mark.parametrize("code", [0, -1, 137, 121])
    def test_no_code_and_what_is_only_kept_on_record_are_not(self, code: Any) -> None:
        assert EARLY.detect(job().happened("xid", "n1", 5, 1, code=code).window()) == []

    def test_an_nvlink_5_error_that_is_not_fatal_is_reported(self) -> None:
        verdict = only(EARLY.detect(job().happened("xid", "n1", 5, 1, code=145, text=NONFATAL).window()))
        assert (verdict.fault, verdict.asks, verdict.fact) == ("nvlink_degraded", "notify", False)

    def test_the_line_says_whether_it_is_fatal(self) -> None:
        assert is_fatal({"code": 149, "text": FATAL})
        assert not is_fatal({"code": 145, "text": NONFATAL})
        assert not is_fatal({"code": 145, "text": "RLW_CTRL Non-fatal XC0 i0"})

    def test_of_two_lines_the_fatal_one_dates_the_error(self) -> None:
        story = (
            job().happened("xid", "n1", 9, 0, code=145, text=NONFATAL).happened("xid", "n1", 5, 0, code=145, text=FATAL)
        )
        assert [error.fatal_s for error in gpu_errors(story.window())] == [NOW_S - 5]
