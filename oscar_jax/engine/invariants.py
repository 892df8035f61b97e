"""What must hold after every operation of an `Allocator`, recomputed from nothing."""

from __future__ import annotations

from collections import Counter

from oscar_jax.engine.allocator import Allocator


class BrokenInvariant(RuntimeError):
    """An allocator's state contradicts itself."""


def check(allocator: Allocator) -> None:
    """Verifies pages, counts, tiers, tree and tails.

    Raises:
        BrokenInvariant: the first contradiction.
    """
    uses: Counter[int] = Counter()
    for sequence in allocator.sequences:
        _check_sequence(allocator, sequence)
        uses.update(allocator.pages(sequence))
    keeps = _check_tree(allocator)
    pool = allocator.pool
    owned = {page for page in range(pool.size) if uses[page] or keeps[page]}
    for page in range(pool.size):
        if (pool.uses[page], pool.keeps[page]) != (uses[page], keeps[page]):
            raise BrokenInvariant(
                f"page {page} counts {pool.uses[page]} uses and {pool.keeps[page]} keeps, owners are {uses[page]} "
                f"and {keeps[page]}."
            )
    if sorted(pool.free) != [page for page in range(pool.size) if page not in owned]:
        raise BrokenInvariant(f"free pages are {sorted(pool.free)}, those without owners are others.")
    if pool.idle != sum(not uses[page] for page in owned):
        raise BrokenInvariant(f"{pool.idle} idle pages are counted, not those that prefixes alone keep.")


def _check_sequence(allocator: Allocator, sequence: int) -> None:
    tiers, length, pages = allocator.tiers, allocator.length(sequence), allocator.pages(sequence)
    sinks, history = min(length, tiers.sink), tiers.history_tokens(length)
    recents = length - sinks - history
    most = tiers.recent + tiers.group - 1
    if history < 0 or not 0 <= recents <= most:
        raise BrokenInvariant(f"sequence {sequence}: {sinks} sinks, {history} in history and {recents} recents.")
    if history and recents < tiers.recent:
        raise BrokenInvariant(f"sequence {sequence}: {recents} recents beside {history} in history.")
    needed = -(-history // tiers.page)
    if len(pages) not in (needed, tiers.history_pages(length + 1)) or len(set(pages)) != len(pages):
        raise BrokenInvariant(f"sequence {sequence}: pages {pages} for {history} tokens of history.")


def _check_tree(allocator: Allocator) -> Counter[int]:
    """Keeps of each page."""
    tree, tiers = allocator.tree, allocator.tiers
    keeps: Counter[int] = Counter()
    children: Counter[int] = Counter()
    hanging = 0
    for key, node in tree.nodes.items():
        parent = node.parent
        if parent is None or node.key != key or key != tree.chain((parent.key, node.tokens)):
            raise BrokenInvariant(f"node of page {node.page} is filed under another hash than its own.")
        if parent is not tree.root and tree.nodes.get(parent.key) is not parent:
            raise BrokenInvariant(f"node of page {node.page} outlived the one before it.")
        if node.end != parent.end + len(node.tokens) or not (node.children or node.tails):
            raise BrokenInvariant(f"node of page {node.page} leads nowhere.")
        keeps[node.page] += 1
        children[id(parent)] += 1
    for node in (tree.root, *tree.nodes.values()):
        if node.children != children[id(node)]:
            raise BrokenInvariant(f"node of page {node.page} counts {node.children} children.")
        for length, tails in node.tails.items():
            hanging += len(tails)
            if not tails or any(len(rest) != length or tails[rest].rest != rest for rest in tails):
                raise BrokenInvariant(f"tails of {length} tokens are filed wrongly.")
    for tail in tree.tails:
        history = tiers.history_tokens(tail.boundary)
        full = tail.node.end - tiers.sink if tail.node.parent is not None else 0
        if not 0 <= history - full < tiers.page or (history > full) != (tail.page is not None):
            raise BrokenInvariant(f"tail at {tail.boundary} hangs on a node that ends at {tail.node.end}.")
        if tail.page is not None:
            keeps[tail.page] += 1
    slots = [tail.slot for tail in tree.tails]
    if hanging != len(slots) or sorted(slots + tree.free_slots) != list(range(tree.slots)):
        raise BrokenInvariant(f"tail slots {slots} and {tree.free_slots}: not each one held once or free.")
    return keeps
