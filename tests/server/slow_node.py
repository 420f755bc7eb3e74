"""A server that has recorded a slow node: samples beside its peers', an incident, an action, GPUs and a delivery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_eye.schema.action import EvidenceItem, MemberRank
from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.model.records import Attempt, AttemptMembers, AuditEntry, Delivery, Gpu, Job, Node
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, Running, action, body, frame, incident, running

NODES = [f"n{n}" for n in range(1, 7)]
ONSET_S, LAST_S = NOW - 20, NOW - 1
COMPUTE = EvidenceItem("train_compute_seconds", "n1", 0, 2.0, 1.0, 1.5, "seconds")
SLOW: dict[str, Any] = {"fault": "straggler", "onset_s": ONSET_S, "detected_s": NOW - 5, "seen_s": NOW - 5}


def sample(node: str, number: int, time_s: float) -> Frame:
    slow = node == "n1" and time_s > ONSET_S
    values = {
        "train_compute_seconds": 2.0 if slow else 1.0,
        "train_step_seconds": 2.1 if time_s > ONSET_S else 1.1,
        "train_loss": 3.0,
        "train_tokens_per_second": 100.0,
    }
    at = int(node[1:]) - 1
    return frame(
        number,
        node=node,
        time_s=time_s,
        ranks=[Rank("job", at, 6, 0, role="pp0" if at < 5 else "pp1")],
        blocks=[block(Scope.DEVICE, {0: values})],
    )


@contextlib.contextmanager
def slow_node_server(folder: Path, clock: FakeClock) -> Iterator[Running]:
    """Run the server; n1 of six nodes is slow from ONSET_S on, and says nothing from 10 to 7 seconds before now."""
    with running(folder, clock) as started:
        for node in NODES:
            times = [NOW - at for at in range(60, 0, -1) if node != "n1" or not 7 <= at <= 10]
            started.send(body(*(sample(node, at, time_s) for at, time_s in enumerate(times, 1)), sent_s=NOW))
        attempt = Attempt(
            id="att_1", run="att_1", job="job", attempt=0, started_s=NOW - 60, seen_s=NOW, nodes=6, gpus=6
        )
        sent = Delivery(
            id="d-1", event_id="e-1", subscription_id="sub-1", type="eagle_eye.action.requested", state="delivered",
            attempts=1, due_s=NOW, group="inc_1", created_s=NOW, updated_s=NOW,
        )  # fmt: skip
        gpu = Gpu(
            uuid="GPU-1", node="n1", device=0, model="H100", since_s=NOW - 900, first_seen_s=NOW - 900, seen_s=NOW,
            pci_address="0000:1b:00.0", serial="16520",
        )  # fmt: skip
        other = Job(
            job="notebook", attempt=0, state="running", ranks=[MemberRank(0, "n1", 7)], restart_owner="", updated_s=NOW
        )
        started.dispatcher.services.store.commit(
            Change(
                incidents=(
                    incident(evidence=[COMPUTE], **SLOW),
                    incident("inc_2", node=None, nodes=[], fault="loss_spike"),
                ),
                actions=(action(state="awaiting", incident_id="inc_1"),),
                nodes=(Node(node="n1", state="in_service", reason="", updated_s=NOW),),
                jobs=(other,),
                attempts=(attempt,),
                memberships=(AttemptMembers(id="att_1", job="job", started_s=NOW - 60, nodes=NODES),),
                deliveries=(sent,),
                gpus=(gpu,),
                audit=(AuditEntry(time_s=NOW - 5, who="server", verb="open", subject="inc_1", detail="straggler"),),
            )
        )
        yield started
