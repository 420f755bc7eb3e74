from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.agent import hook  # noqa: E402
from eagle_eye.agent.hook import Training, attach  # noqa: E402
from eagle_eye.agent.training_hook.torch_module import Share  # noqa: E402
from tests.agent.fakes import Listener  # noqa: E402

# The compiler warns of its own deprecations.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 6
Attach = Callable[[Any], Training]


def compiled_then_attached(model: Any, attached: Attach) -> tuple[Any, Training]:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    return compiled, attached(compiled)


def attached_then_compiled(model: Any, attached: Attach) -> tuple[Any, Training]:
    training = attached(model)
    return torch.compile(model, backend="eager", fullgraph=True), training


def attached_then_compiled_in_place(model: Any, attached: Attach) -> tuple[Any, Training]:
    training = attached(model)
    model.compile(backend="eager", fullgraph=True)
    return model, training


@pytest.mark.parametrize(
    ("order", "looked_into"),
    [(compiled_then_attached, STEPS // 2), (attached_then_compiled, 0), (attached_then_compiled_in_place, 0)],
)
def test_the_hook_neither_breaks_a_compiled_graph_nor_has_it_compiled_again(
    order: Callable[[Any, Attach], tuple[Any, Training]],
    looked_into: int,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook, "SEND_EVERY_S", 3600.0)
    monkeypatch.setattr(Share, "looked", lambda share, _cost_s, _step_s: setattr(share, "every", 2))
    torch._dynamo.reset()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    called, training = order(model, lambda each: attach(each, optimizer, socket=listener.path, heartbeat_s=3600.0))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(STEPS):
            loss = called(torch.ones(2, 8)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step(loss=loss)
    training.detach()
    totals = listener.read_last().totals
    assert (totals.steps, totals.losses, totals.compute_steps) == (STEPS, STEPS, looked_into)
    assert training.failures == 0
