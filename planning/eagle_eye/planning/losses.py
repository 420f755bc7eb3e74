"""Effects of losing one node: the next layout, what is copied from where, and whether rerouting is better. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.planning.plan import Copy, Layout, NodeLoss, Reroute, Template
from eagle_eye.planning.simulation import simulate

SIMULATED_PASSES_MAX = 20_000  # per loss: a tenth of a second
_LESS = 1 - 1e-9  # differences below this are rounding errors


class _Place(NamedTuple):
    """A node's place: layers ``begin`` to ``end`` - 1; of an idle node none."""

    begin: int
    end: int


_Templates = Mapping[int, Template]


def losses(
    before: Layout, after: Layout, templates: _Templates, state_bytes: Sequence[int], stage_memory_bytes: int
) -> tuple[NodeLoss, ...]:
    """Return the effect of losing each kind of node of the layout; ``state_bytes`` are sums over the first layers.

    Pipelines of one template are alike but for their batch, so one of them stands for all.
    """
    return tuple(
        _loss(template, node, before, after, templates, state_bytes, stage_memory_bytes)
        for template, node in before.kinds()
    )


def _loss(
    template: int,
    node: int,
    before: Layout,
    after: Layout,
    templates: _Templates,
    state_bytes: Sequence[int],
    stage_memory_bytes: int,
) -> NodeLoss:
    lost = before.last_begin(template) + node if template else before.nodes - 1
    held, needed = _places(before, templates), _places(after, templates)
    survivors = _survivors(before, after, lost, held, needed, state_bytes)
    copies = tuple(_copies(survivors, held, needed, state_bytes))
    less_s = after.step_s * _LESS
    reroute = _reroute(before, templates, template, node, stage_memory_bytes, less_s) if template else None
    rerouted = reroute is not None and reroute.step_s is not None and reroute.step_s < less_s
    return NodeLoss(
        template=template,
        node=node,
        survivors=tuple(survivors),
        copies=copies,
        reroute=reroute,
        rerouted=rerouted,
        why=_why(template, reroute, after.step_s),
    )


def _places(layout: Layout, templates: _Templates) -> list[_Place]:
    found = []
    for pipeline in layout.pipelines:
        stages = templates[pipeline.template].stages
        for node in range(pipeline.template):
            own = [stage for stage in stages if stage.node == node]
            found.append(_Place(own[0].first, own[-1].last + 1) if own else _Place(0, 0))
    return found + [_Place(0, 0)] * layout.idle_nodes


def _survivors(
    before: Layout,
    after: Layout,
    lost: int,
    held: Sequence[_Place],
    needed: Sequence[_Place],
    state_bytes: Sequence[int],
) -> list[int]:
    """Return who takes each place: whole pipelines stay, then nodes are assigned by how much they keep, most first."""
    taken: dict[int, int] = {}
    whole = defaultdict[int, list[int]](list)
    for pipeline, begin in zip(before.pipelines, before.begins(), strict=True):
        if not begin <= lost < begin + pipeline.template:
            whole[pipeline.template].append(begin)
    for pipeline, begin in zip(after.pipelines, after.begins(), strict=True):
        if whole[pipeline.template]:
            old = whole[pipeline.template].pop(0)
            taken |= {begin + node: old + node for node in range(pipeline.template)}
    gone = {lost, *taken.values()}
    nodes = [place for place in range(before.nodes) if place not in gone]
    places = [place for place in range(after.nodes) if place not in taken]
    kept = []
    for node in nodes:
        for place in places:
            begin, end = max(held[node].begin, needed[place].begin), min(held[node].end, needed[place].end)
            if begin < end:
                kept.append((state_bytes[begin] - state_bytes[end], node, place))
    free = set(nodes)
    for _, node, place in sorted(kept):
        if node in free and place not in taken:
            taken[place] = node
            free.remove(node)
    rest = iter(sorted(free))
    return [taken[place] if place in taken else next(rest) for place in range(after.nodes)]


def _copies(
    survivors: Sequence[int],
    held: Sequence[_Place],
    needed: Sequence[_Place],
    state_bytes: Sequence[int],
) -> Iterator[Copy]:
    """Yield what each place lacks, from the sources with the least load so far."""
    asked = dict.fromkeys(survivors, 0)
    for place, survivor in enumerate(survivors):
        has, needs = held[survivor], needed[place]
        at = needs.begin
        while at < needs.end:
            if has.begin <= at < has.end:
                at = has.end
                continue
            stop = has.begin if at < has.begin < needs.end else needs.end
            holders = [node for node in survivors if held[node].begin <= at < held[node].end]
            source = min(holders, key=lambda node: (asked[node], node), default=None)
            if source is not None:
                end = min(stop, held[source].end)
            else:
                end = next(
                    (
                        layer
                        for layer in range(at + 1, stop)
                        if any(held[node].begin <= layer < held[node].end for node in survivors)
                    ),
                    stop,
                )
            size = state_bytes[end] - state_bytes[at]
            if source is not None:
                asked[source] += size
            yield Copy(to=place, first=at, last=end - 1, source=source, copied_bytes=size)
            at = end


def _reroute(
    before: Layout, templates: _Templates, template: int, node: int, stage_memory_bytes: int, less_than_s: float
) -> Reroute | None:
    """Return the step time while peers run the node's stages; None where no other pipeline has the same ones."""
    alike = [pipeline for pipeline in before.pipelines if pipeline.template == template]
    stages = templates[template].stages
    own = [place for place, stage in enumerate(stages) if stage.node == node]
    if len(alike) < 2 or not own:
        return None
    peers = len(alike) - 1
    batches = [pipeline.micro_batches for pipeline in alike]
    times_s = [stage.forward_s + stage.backward_s for stage in stages]
    # The lost pipeline may be the one with the most. Whoever takes its passes, some peer runs the mean at least.
    others_s = max((pipeline.step_s for pipeline in before.pipelines if pipeline is not alike[0]), default=0.0)
    busiest_s = max(sum(times_s[:place]) + sum(batches) / peers * times_s[place] for place in own)
    soonest_s = max(others_s, busiest_s)
    fits = all(
        stages[place].memory_bytes + -(-(len(stages) - place) // peers) * stages[place].activation_bytes
        <= stage_memory_bytes
        for place in own
    )
    took_s = None
    if fits and soonest_s < less_than_s and 2 * len(stages) * sum(batches) <= SIMULATED_PASSES_MAX:
        took_s = max(simulate(stages, batches, failed=0, lost=own)[-1].end_s, others_s)
    return Reroute(
        peers=peers, more_micro_batches=-(-batches[0] // peers), step_s_min=soonest_s, step_s=took_s, fits=fits
    )


def _why(template: int, reroute: Reroute | None, next_s: float) -> str:
    if not template:
        return "an idle node: training goes on as it is"
    if reroute is None:
        return "no other pipeline has the same stages to take its micro-batches"
    peers = "its one peer" if reroute.peers == 1 else f"each of {reroute.peers} peers"
    its = f"{reroute.more_micro_batches} more micro-batches of its stages at {peers}"
    then = f"the next layout takes {next_s:.4g} s"
    if not reroute.fits:
        return f"{its} do not fit into their memory"
    if reroute.step_s_min >= next_s * _LESS:
        return f"{its} are more than their bubbles hold: {reroute.step_s_min:.4g} s a step at least; {then}"
    if reroute.step_s is None:
        return f"{its} would take {reroute.step_s_min:.4g} s a step or more, too many to be worked out; {then}"
    if reroute.step_s < next_s * _LESS:
        return f"{its} fill their bubbles: {reroute.step_s:.4g} s a step, and nothing is copied; {then}"
    return (
        f"{its} take {reroute.step_s:.4g} s a step by 1F1B, and {reroute.step_s_min:.4g} s at least where a schedule"
        f" fills all bubbles; {then}"
    )
