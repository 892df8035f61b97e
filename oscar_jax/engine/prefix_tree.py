"""Token prefixes whose pages are kept for later requests.

A node is a full page of history: the first one stands for the sinks and page 0, the others for one page of tokens
each. Nodes are found by a hash chained over the blocks, and a hash hit counts only if the tokens are equal too. A hit
can only end at a *tail*: the plain tokens before a boundary, copied aside when the boundary was reached, since K and V
behind it depend on them. A tail hangs on the node of the last page that its boundary fills, with the tokens after it
and the page that these fill in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from oscar_jax.engine.pool import Pool

if TYPE_CHECKING:  # that module imports jax
    from pallas_kernels.tiers import Tiers

Hash = Callable[[tuple[int, tuple[int, ...]]], int]


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A full page of history; the root has none (`page` -1).

    Attributes:
        key: hash chained from the root.
        tokens: of this block.
        end: tokens from the start of the prefix to the end of this block.
        children: number of nodes that continue it.
        tails: tails that hang here, by the number and the ids of their tokens after `end`.
    """

    key: int
    parent: Node | None
    tokens: tuple[int, ...]
    end: int
    page: int
    children: int = 0
    tails: dict[int, dict[tuple[int, ...], Tail]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class Tail:
    """A boundary at which a hit can end.

    Attributes:
        node: last page that is full at the boundary.
        rest: tokens between that page and the boundary.
        page: page that is filled in part at the boundary, or None.
        slot: where the plain tokens before the boundary lie on the device.
    """

    node: Node
    rest: tuple[int, ...]
    page: int | None
    slot: int

    @property
    def boundary(self) -> int:
        """Tokens of the prefix."""
        return self.node.end + len(self.rest)

    def pages(self) -> list[int]:
        """Pages of the prefix in order, a part-filled last one included."""
        pages = [*self.full_pages()][::-1]
        return pages if self.page is None else [*pages, self.page]

    def full_pages(self) -> Iterator[int]:
        """Full pages of the prefix, the last one first."""
        node = self.node
        while node.parent is not None:
            yield node.page
            node = node.parent


class PrefixTree:
    """Prefixes in least-recently-used order, over the pages of a pool.

    Attributes:
        nodes: by chained hash, without the root.
        tails: least recently used first (the values are not used).
        free_slots: places for plain tokens that no tail has.
        evictions: tails evicted so far.
    """

    def __init__(self, pool: Pool, tiers: Tiers, *, slots: int, chain: Hash = hash):
        """
        Args:
            slots: most tails.
            chain: hash of a parent's hash and a block; another one is of use to tests only.
        """
        self.pool, self.tiers, self.chain, self.slots = pool, tiers, chain, slots
        self.root = Node(0, None, (), 0, -1)
        self.nodes: dict[int, Node] = {}
        self.tails: dict[Tail, None] = {}
        self.free_slots = list(range(slots - 1, -1, -1))
        self.evictions = 0

    def match(self, tokens: Sequence[int]) -> Tail | None:
        """The tail with the longest boundary whose prefix the tokens begin with."""
        node, best = self.root, None
        while node is not None:
            for length in sorted(node.tails, reverse=True):
                if node.end + length <= len(tokens):
                    rest = tuple(tokens[node.end : node.end + length])
                    if (tail := node.tails[length].get(rest)) is not None:
                        best = tail
                        break
            node = self._child(node, tokens)
        return best

    def touch(self, tail: Tail) -> None:
        """Makes a tail the most recently used one."""
        del self.tails[tail]
        self.tails[tail] = None

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Tail | None:
        """Keeps a prefix, evicting the least recently used one if all slots are taken.

        Args:
            tokens: of the whole prefix.
            pages: of its history, in order. Blocks that the tree has already keep their pages.

        Returns:
            The new tail, or None if there is such a tail already (now the most recently used), no slot at all, or
            another prefix with the same hash.
        """
        tail = self.match(tokens)
        if tail is not None and tail.boundary == len(tokens):
            self.touch(tail)
            return None
        if not self.slots:
            return None
        if not self.free_slots:
            self.evict(next(iter(self.tails)))
        full, part = divmod(self.tiers.history_tokens(len(tokens)), self.tiers.page)
        node = self.root
        for page in pages[:full]:
            child = self._child(node, tokens) or self._grow(node, tokens, page)
            if child is None:
                self._prune(node)
                return None
            node = child
        rest = tuple(tokens[node.end :])
        tail = Tail(node, rest, pages[full] if part else None, self.free_slots.pop())
        if tail.page is not None:
            self.pool.keep(tail.page)
        node.tails.setdefault(len(rest), {})[rest] = tail
        self.tails[tail] = None
        return tail

    def evict(self, tail: Tail) -> None:
        """Forgets a tail, and the pages that no other tail needs."""
        del self.tails[tail]
        same_length = tail.node.tails[len(tail.rest)]
        del same_length[tail.rest]
        if not same_length:
            del tail.node.tails[len(tail.rest)]
        if tail.page is not None:
            self.pool.drop(tail.page)
        self.free_slots.append(tail.slot)
        self.evictions += 1
        self._prune(tail.node)

    def reclaim(self) -> None:
        """Evicts least recently used tails until a page comes free; the pool must have an idle page."""
        while not self.pool.free:
            self.evict(next(tail for tail in self.tails if self._holds_idle(tail)))

    def _holds_idle(self, tail: Tail) -> bool:
        """Whether evicting this tail brings an idle page closer to being free."""
        uses, node = self.pool.uses, tail.node
        if tail.page is not None and not uses[tail.page]:
            return True
        # A used page may follow an idle one: two sequences wrote the same tokens, and each gave the tree some pages.
        return not node.children and any(not uses[page] for page in tail.full_pages())

    def _block(self, node: Node, tokens: Sequence[int]) -> tuple[int, ...] | None:
        end = node.end + self.tiers.page + (self.tiers.sink if node.parent is None else 0)
        return tuple(tokens[node.end : end]) if end <= len(tokens) else None

    def _child(self, node: Node, tokens: Sequence[int]) -> Node | None:
        block = self._block(node, tokens)
        if block is None:
            return None
        child = self.nodes.get(self.chain((node.key, block)))
        return child if child is not None and child.parent is node and child.tokens == block else None

    def _grow(self, node: Node, tokens: Sequence[int], page: int) -> Node | None:
        block = self._block(node, tokens)
        assert block is not None  # a full page of history lies before the boundary
        key = self.chain((node.key, block))
        if key in self.nodes:
            return None
        self.pool.keep(page)
        child = Node(key, node, block, node.end + len(block), page)
        self.nodes[key] = child
        node.children += 1
        return child

    def _prune(self, node: Node) -> None:
        while node.parent is not None and not node.children and not node.tails:
            del self.nodes[node.key]
            self.pool.drop(node.page)
            node = node.parent
            node.children -= 1
