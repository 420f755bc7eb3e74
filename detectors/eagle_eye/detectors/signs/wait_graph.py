"""A wait-for graph of ranks, with a search for the ends of its wait chains."""

from __future__ import annotations

from collections.abc import Sequence


class WaitGraph:
    """A wait-for graph of ranks and of what they wait in. Nodes are numbered from 0.

    An edge leads from the waiting node to what it waits for.
    """

    def __init__(self) -> None:
        self.edges: list[list[int]] = []

    def node(self, *targets: int) -> int:
        """Add a node that waits for ``targets`` and return it."""
        self.edges.append(list(targets))
        return len(self.edges) - 1

    def edge(self, source: int, target: int) -> None:
        """Make ``source`` wait for ``target``."""
        self.edges[source].append(target)

    def ends(self) -> list[list[int]]:
        """Return where chains end: each set of nodes that lead to each other and to nothing else.

        A set of one is a node that waits for nothing, or only for itself.
        """
        component_of, count = strong_components(self.edges)
        leaves = [False] * count
        for node, targets in enumerate(self.edges):
            component = component_of[node]
            if not leaves[component]:
                leaves[component] = any(component_of[target] != component for target in targets)
        found: dict[int, list[int]] = {}
        for node, component in enumerate(component_of):
            if not leaves[component]:
                found.setdefault(component, []).append(node)
        return list(found.values())


def strong_components(edges: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Return each node's strongly connected component, and the number of components.

    Sharir, Comput. Math. Appl. 1981, without recursion; linear in nodes and edges.
    """
    backwards: list[list[int]] = [[] for _ in edges]
    for node, targets in enumerate(edges):
        for target in targets:
            backwards[target].append(node)
    component_of = [-1] * len(edges)
    count = 0
    for root in reversed(_left_last(edges)):
        if component_of[root] >= 0:
            continue
        component_of[root] = count
        work = [root]
        while work:
            for source in backwards[work.pop()]:
                if component_of[source] < 0:
                    component_of[source] = count
                    work.append(source)
        count += 1
    return component_of, count


def _left_last(edges: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes in depth-first postorder."""
    seen = [False] * len(edges)
    left: list[int] = []
    for root in range(len(edges)):
        if seen[root]:
            continue
        seen[root] = True
        work = [(root, iter(edges[root]))]
        while work:
            node, targets = work[-1]
            for target in targets:
                if not seen[target]:
                    seen[target] = True
                    work.append((target, iter(edges[target])))
                    break
            else:
                left.append(node)
                work.pop()
    return left
