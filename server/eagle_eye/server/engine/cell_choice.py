"""Which cell a job is given to, and which job goes to another one where a cell has too much. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

MUCH_RATIO = 1.5  # of the mean load of the cells: who has more gives a job away
MUCH_NODES = 64  # above the mean; below it there is nothing to gain


class Move(NamedTuple):
    """A job, and the cells that it leaves and goes to."""

    job: str
    source: str
    target: str


def choose(load: Mapping[str, int], here: str, near: Iterable[str] = ()) -> str:
    """Return the cell for a new job: the one that judges most jobs on its nodes, else the one with the fewest nodes.

    ``load`` has the nodes of each cell that lives, ``near`` the cells of the other jobs on its nodes, one for each
    node: a node's frames go to one cell. Of cells with equally many nodes it is ``here``, which hears the job now.
    """
    shared = [cell for cell in near if cell in load]
    if shared:
        return max(sorted(set(shared)), key=shared.count)
    return min(load, key=lambda cell: (load[cell], cell != here, cell))


def next_move(
    nodes: Mapping[str, int], cell_of: Mapping[str, str], living: Collection[str], held: Collection[str]
) -> Move | None:
    """Return the one job to move so that no cell has far more than its share, None where nothing is to gain.

    ``nodes`` are those of each job, ``held`` the jobs that stay: something of theirs is open. The largest job goes that
    leaves its cell with at least as much as the other one has then.
    """
    load = dict.fromkeys(living, 0)
    for job, count in nodes.items():
        if cell_of[job] in load:
            load[cell_of[job]] += count
    if len(load) < 2:
        return None
    mean = sum(load.values()) / len(load)
    source, target = max(sorted(load), key=load.__getitem__), min(sorted(load), key=load.__getitem__)
    if load[source] <= MUCH_RATIO * mean or load[source] - mean < MUCH_NODES:
        return None
    excess = (load[source] - load[target]) / 2
    movable = [
        (count, job)
        for job, count in nodes.items()
        if cell_of[job] == source and job not in held and 0 < count <= excess
    ]
    return Move(max(movable)[1], source, target) if movable else None
