"""Which nodes are vouched for by a trusted source, so that invented names cannot raise limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.identity import NodeNames


class Vouchers:
    """The sources that vouch for nodes.

    Vouched nodes are those whose own agent reports (its token is bound to the node), that an administrator sends frames
    for, that hold an agent's token, that a scheduler or launcher names, and those of the topology file, ``placed``. A
    remote-write token vouches only for nodes that it names without a wildcard. On the event loop.
    """

    def __init__(self, placed: Iterable[str] = ()) -> None:
        self._placed = frozenset(placed)
        self._spoken: set[str] = set()
        self._enrolled: AbstractSet[str] = frozenset()
        self._declared: AbstractSet[str] = frozenset()
        self._scheduled: dict[str, NodeNames] = {}
        # Per scheduler, its node names resolved to ours: of a hundred domains of one name only one matches.
        self._meant: dict[tuple[str, str], str] = {}

    def note_spoken(self, node: str) -> None:
        """Record that the node's own agent, or an administrator, sent its frames."""
        self._spoken.add(node)

    def use_tokens(self, nodes: AbstractSet[str]) -> None:
        """Replace the set of nodes that hold a valid agent's token."""
        self._enrolled = nodes

    def use_jobs(self, nodes: AbstractSet[str]) -> None:
        """Replace the set of nodes of jobs that launchers and schedulers declare."""
        self._declared = nodes

    def use_scheduler(self, source: str, names: NodeNames) -> None:
        """Replace the set of a scheduler's nodes, by the scheduler's names for them."""
        self._scheduled[source] = names

    def forget(self, nodes: Collection[str]) -> None:
        """Forget that the nodes reported; other sources still vouch for them."""
        self._spoken.difference_update(nodes)
        self._meant = {key: node for key, node in self._meant.items() if node not in nodes}

    def vouch_for(self, node: str) -> bool:
        """Return whether any source vouches for the node."""
        if node in self._spoken or node in self._enrolled or node in self._declared or node in self._placed:
            return True
        return self._is_scheduled(node)

    def count(self, nodes: AbstractSet[str]) -> int:
        """Return how many of the nodes are vouched for."""
        others = nodes - self._spoken - self._enrolled - self._declared - self._placed
        named = sum(map(self._is_scheduled, others)) if self._scheduled else 0
        return len(nodes) - len(others) + named

    def _is_scheduled(self, node: str) -> bool:
        return any(self._is_meant(source, names, node) for source, names in self._scheduled.items())

    def _is_meant(self, source: str, names: NodeNames, node: str) -> bool:
        theirs = names.ours(node)
        if theirs is None:
            return False
        return theirs.casefold() == node.casefold() or self._meant.setdefault((source, theirs), node) == node


class Unvouched:
    """Unvouched nodes, each with the remote-write token that named it first ("" if no longer known)."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, node: object) -> bool:
        return node in self._tokens

    def token_of(self, node: str) -> str:
        """Return the token, "" for none."""
        return self._tokens.get(node, "")

    def count_of(self, token: str) -> int:
        """Return how many nodes the token named."""
        return self._counts[token]

    def add(self, node: str, token: str) -> None:
        """Add a node, replacing its earlier token."""
        self.discard(node)
        self._tokens[node] = token
        self._counts[token] += 1

    def discard(self, node: str) -> None:
        """Remove a node if present."""
        token = self._tokens.pop(node, None)
        if token is not None:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]


class NodeQuota:
    """The nodes ever heard of: at most ``nodes_max`` vouched ones and as many unvouched ones."""

    def __init__(self, nodes_max: int, vouchers: Vouchers) -> None:
        self._nodes_max = nodes_max
        self._vouchers = vouchers
        self.known: set[str] = set()
        self.unvouched = Unvouched()

    def check(self, node: str) -> None:
        """Raise Refusal 403 unless the node is known and vouched for, or there is room for one more."""
        if node not in self.known and len(self.known) - len(self.unvouched) >= self._nodes_max:
            raise Refusal(
                403,
                "too_many_nodes",
                f"{self._nodes_max} nodes are known and {node!r} is none of them; remove those that"
                " are gone (eagle-eye nodes forget), or raise ingest.nodes_max",
            )

    def reserve(self, node: str, token: str, token_nodes_max: int) -> bool:
        """Reserve room for a node that a remote-write token names; return whether it is new and unvouched.

        ``release`` it if nothing of it is kept. Raises Refusal 403 if the token has named too many.
        """
        if self._vouchers.vouch_for(node):
            self.unvouched.discard(node)
            self.check(node)
            return False
        if node in self.known or node in self.unvouched:
            return node not in self.known
        named = self.unvouched.count_of(token)
        if named >= token_nodes_max:
            raise Refusal(
                403,
                "too_many_new_nodes",
                f"the token has named {named} nodes that nobody vouches for, and {node!r} is none of them; name them to"
                " the scheduler or in topology_file, remove those that are gone (eagle-eye nodes forget), or raise"
                " remote_write.token_nodes_max (of one token: tokens create --nodes-max)",
            )
        if len(self.unvouched) >= self._nodes_max:
            raise Refusal(
                403,
                "too_many_nodes",
                f"{self._nodes_max} nodes are known that nobody vouches for and {node!r} is none of them;"
                " raise ingest.nodes_max",
            )
        self.unvouched.add(node, token)
        return True

    def release(self, nodes: Collection[str]) -> None:
        """Release the reservations for those of the nodes that are not known."""
        for node in nodes:
            if node not in self.known:
                self.unvouched.discard(node)

    def leave(self, node: str) -> None:
        """Remove a node."""
        self.known.discard(node)
        self.unvouched.discard(node)
