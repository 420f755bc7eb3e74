from __future__ import annotations

import pytest

from eagle_eye.agent.training_hook.torch_module import StepTimer


def backward(timer: StepTimer, now_s: float) -> None:
    timer.backward_end(now_s)


def test_a_step_is_split_at_its_moments() -> None:
    timer = StepTimer()
    timer.finish(10.0)
    timer.forward(11.0)
    backward(timer, 14.0)
    timer.optimizer(18.0)
    parts = timer.finish(19.0)
    assert (parts.step_s, parts.data_wait_s, parts.compute_s, parts.collective_s) == (9.0, 1.0, 3.0, 4.0)
    assert parts.backwards == 1


def test_the_first_step_begins_with_its_forward() -> None:
    timer = StepTimer()
    timer.forward(100.0)
    backward(timer, 101.0)
    timer.optimizer(101.5)
    parts = timer.finish(102.0)
    assert parts.step_s == 2.0
    assert parts.data_wait_s is None


def test_without_a_model_only_the_step_is_known_from_the_second_on() -> None:
    timer = StepTimer()
    assert timer.finish(5.0).step_s is None
    assert timer.finish(7.0) == (2.0, None, None, None, 0)


def test_without_an_optimizer_the_collective_is_not_observed() -> None:
    timer = StepTimer()
    timer.forward(1.0)
    backward(timer, 3.0)
    parts = timer.finish(9.0)
    assert parts.compute_s == 2.0
    assert parts.collective_s is None


def test_accumulated_backwards_add_their_compute() -> None:
    timer = StepTimer()
    timer.finish(0.0)
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.forward(4.0)
    backward(timer, 6.0)
    timer.optimizer(7.0)
    parts = timer.finish(8.0)
    assert (parts.compute_s, parts.data_wait_s, parts.collective_s, parts.backwards) == (4.0, 2.0, 1.0, 2)


def test_where_the_model_reduces_by_itself_what_comes_after_is_no_collective() -> None:
    timer = StepTimer()
    timer.finish(0.0)
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.reduced(7.0)
    timer.optimizer(50.0)
    parts = timer.finish(51.0)
    assert (parts.compute_s, parts.collective_s) == (2.0, 4.0)


def test_a_reduction_is_known_without_an_optimizer() -> None:
    timer = StepTimer()
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.reduced(7.0)
    assert timer.finish(51.0).collective_s == 4.0


def test_a_second_backward_after_a_reduction_counts_without_it() -> None:
    timer = StepTimer()
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.reduced(7.0)
    backward(timer, 9.0)
    timer.reduced(10.0)
    parts = timer.finish(20.0)
    assert (parts.compute_s, parts.collective_s, parts.backwards) == (4.0, 5.0, 2)


def test_after_a_reduction_comes_the_wait_for_data_of_the_next_micro_batch() -> None:
    timer = StepTimer()
    timer.finish(0.0)
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.reduced(7.0)
    timer.forward(9.0)
    backward(timer, 10.0)
    timer.reduced(12.0)
    parts = timer.finish(20.0)
    assert (parts.compute_s, parts.data_wait_s, parts.collective_s) == (3.0, 3.0, 6.0)


def test_only_the_first_entry_of_a_wrapped_module_ends_its_buffers_collective() -> None:
    timer = StepTimer()
    timer.forward(0.0)
    timer.compute_begin(1.0)
    timer.forward(5.0)
    timer.compute_begin(6.0)
    backward(timer, 8.0)
    timer.reduced(8.0)
    parts = timer.finish(9.0)
    assert (parts.compute_s, parts.collective_s) == (7.0, 1.0)


def test_buffers_synchronised_before_the_module_count_as_collective() -> None:
    timer = StepTimer()
    timer.forward(0.0)
    timer.compute_begin(2.0)
    backward(timer, 5.0)
    timer.optimizer(6.0)
    parts = timer.finish(7.0)
    assert parts.compute_s == 3.0
    assert parts.collective_s == pytest.approx(3.0)


def test_a_phase_between_steps_is_in_no_step() -> None:
    timer = StepTimer()
    timer.finish(0.0)
    timer.pause(1.0)
    timer.forward(2.0)
    timer.resume(101.0)
    timer.forward(102.0)
    backward(timer, 104.0)
    timer.optimizer(105.0)
    parts = timer.finish(106.0)
    assert (parts.step_s, parts.data_wait_s, parts.compute_s, parts.collective_s) == (6.0, 1.0, 2.0, 1.0)


def test_a_phase_within_a_step_is_taken_out_of_its_compute() -> None:
    timer = StepTimer()
    timer.forward(0.0)
    timer.pause(1.0)
    timer.pause(2.0)
    timer.resume(10.0)
    timer.resume(11.0)
    backward(timer, 13.0)
    timer.optimizer(14.0)
    parts = timer.finish(15.0)
    assert (parts.step_s, parts.compute_s, parts.collective_s) == (5.0, 3.0, 1.0)


def test_after_an_unannounced_evaluation_the_wait_for_data_is_not_observed() -> None:
    timer = StepTimer()
    timer.finish(0.0)
    timer.ignored_forward()
    timer.forward(50.0)
    backward(timer, 51.0)
    timer.optimizer(52.0)
    assert timer.finish(53.0).data_wait_s is None


def test_a_second_forward_before_the_backward_goes_on_with_the_same_compute() -> None:
    timer = StepTimer()
    timer.forward(0.0)
    timer.forward(1.0)
    backward(timer, 3.0)
    timer.optimizer(3.0)
    assert timer.finish(4.0).compute_s == 3.0
