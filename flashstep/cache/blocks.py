"""The block pool of one id space: who holds which block, and which free blocks still hold something worth finding.

Takes counts, ids and opaque keys (``cache.prefix`` makes them); gives block ids. Knows no bytes, tokens or requests.

A block is in exactly one of three conditions:
  owned    one or more tables hold it (its reference count); it may also have a key, then its contents are final
  cached   nobody holds it, but its key still finds it; the least recently used one is evicted when memory is needed
  free     nobody holds it and nothing is known of its contents
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``. ``order`` is the order of first use (tests permute it; results may not change).

    Cached blocks are evicted in two queues, "cold" before "warm", each least recently used first. Cold are blocks that
    were released as such and have never been found since: window blocks in the middle of a long prompt would otherwise
    flush everybody's window tails.
    """

    def __init__(self, num_blocks: int, *, order: Sequence[int] | None = None) -> None:
        first_use = range(num_blocks) if order is None else order
        assert order is None or sorted(order) == list(range(num_blocks)), (
            "order must be a permutation of all blocks"
        )
        self.num_blocks = num_blocks
        self._free = list(reversed(first_use))  # a stack: pop() gives the first in order
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._warm: OrderedDict[int, None] = OrderedDict()
        self._found = [False] * num_blocks  # shared at least once since it got its key

    # ---- counts --------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return len(self._free) + len(self._cold) + len(self._warm)

    @property
    def owned(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but a key still finds."""
        return len(self._cold) + len(self._warm)

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds: sharing them would lower ``available`` by that many."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    # ---- life of a block -----------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Give ``count`` blocks with one owner each and unknown contents; the caller has looked at ``available``."""
        assert 0 <= count <= self.available, f"asked for {count} blocks, {self.available} are available"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of ``blocks`` (found by key, or owned already)."""
        for block in blocks:
            if self._references[block] == 0:
                assert self._key_of[block] is not None, f"block {block} is free: its contents are unknown"
                self._cold.pop(block, None)
                self._warm.pop(block, None)
            self._references[block] += 1
            self._found[block] = True

    def release(self, blocks: Iterable[int], *, cold: bool = False) -> None:
        """One owner less for each of ``blocks``. Pass a table last block first: its tail is then evicted before its head."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            elif cold and not self._found[block]:
                self._cold[block] = None
            else:
                self._warm[block] = None

    # ---- contents ------------------------------------------------------------------------------------------------

    def register(self, block: int, key: bytes) -> bool:
        """State that owned ``block`` holds, for good, the contents that ``key`` names. False if another block does already."""
        assert self._references[block] > 0, f"block {block} is registered but nobody owns it"
        assert self._key_of[block] is None, f"block {block} has a key already"
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._found[block] = False
        return True

    def find(self, key: bytes) -> int | None:
        """The block that holds the contents named ``key``."""
        return self._block_of.get(key)

    def _evict(self) -> int:
        queue = self._cold or self._warm
        block, _ = queue.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block

    # ---- integrity -----------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that ``tables`` (of all owners) explain every reference, and that no block is lost or in two conditions."""
        held = Counter(chain.from_iterable(tables))
        referenced = {block: count for block, count in enumerate(self._references) if count}
        assert referenced == held, f"references {referenced} are not what the owners hold: {dict(held)}"
        unowned = [*self._free, *self._cold, *self._warm]
        places = set(unowned)
        assert len(unowned) == len(places), "a block is in two of the free and cached queues"
        assert places.isdisjoint(held), "a block with an owner is in a queue"
        assert len(places) + len(held) == self.num_blocks, "a block without owner is in no queue"
        assert all(self._key_of[block] is None for block in self._free), "a free block has a key"
        cached = [*self._cold, *self._warm]
        assert all(self._key_of[block] is not None for block in cached), "a cached block has no key"
        keyed = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert keyed == self._block_of, "the index and the blocks' keys disagree"
