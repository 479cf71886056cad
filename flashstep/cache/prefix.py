"""Which blocks already hold these tokens: the hash chain over a sequence's blocks, and the longest usable hit.

A block's key is SHA-256 over its predecessor's key and its own token ids, rooted in the request's ``cache_salt``: equal
keys mean equal tokens from position 0 on (to the strength of SHA-256) and the same tenant. One chain serves both id
spaces, global and window. A hit is a whole number of blocks; blocks are even, so a hit never splits a ratio-2 group.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from flashstep.cache.blocks import BlockPool
from flashstep.config.cache import HitPolicy

_ROOT = b"flashstep prefix v1\0"


class Chain:
    """The keys of the full blocks of one growing sequence."""

    __slots__ = ("_block_size", "_root", "keys")

    def __init__(self, block_size: int, *, salt: str) -> None:
        self.keys: list[bytes] = []
        self._block_size = block_size
        self._root = sha256(_ROOT + salt.encode()).digest()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that ``tokens`` (the whole sequence so far) fills beyond those already keyed."""
        size, keys = self._block_size, self.keys
        first, last = len(keys) * size, len(tokens) // size * size
        if first >= last:
            return
        data = memoryview(array("I", tokens[first:last]).tobytes())
        width = 4 * size
        key = keys[-1] if keys else self._root
        for start in range(0, len(data), width):
            digest = sha256(key)
            digest.update(data[start : start + width])
            key = digest.digest()
            keys.append(key)


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The first ``tokens`` tokens of a sequence, which need not be computed: a hit, and what comes from outside behind it.

    ``blocks`` are its global blocks; ``window_blocks`` the window blocks of its end, the first of which stands at table
    index ``window_base``. The last ``replay`` tokens must be run again to rebuild windows (bounded policy). The records of the
    last ``transferred`` tokens are not cached here: they come from outside into blocks that are yet to be taken.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    window_blocks: tuple[int, ...] = ()
    window_base: int = 0
    replay: int = 0
    transferred: int = 0

    @property
    def cached(self) -> int:
        """Tokens that were found here."""
        return self.tokens - self.transferred


NO_PREFIX = Prefix()


def longest_hit(
    keys: Sequence[bytes],
    *,
    global_pool: BlockPool,
    window_pool: BlockPool,
    policy: HitPolicy,
    block_size: int,
    window: int,
) -> Prefix:
    """The longest hit over the blocks named by ``keys`` (the caller has left out those that must be computed).

    EXACT: a hit of H tokens needs the global blocks of [0, H) and the window blocks that cover [H - window, H).
    BOUNDED: it needs only the global blocks, replays its last ``window`` tokens, and H <= window is a miss.
    """
    blocks: list[int] = []
    for key in keys:
        block = global_pool.find(key)
        if block is None:
            break
        blocks.append(block)
    if policy is HitPolicy.BOUNDED:
        tokens = len(blocks) * block_size
        if tokens <= window:
            return NO_PREFIX
        return Prefix(
            tokens=tokens, blocks=tuple(blocks), window_base=(tokens - window) // block_size, replay=window
        )
    count = _windowed_prefix(keys[: len(blocks)], window_pool, block_size=block_size, window=window)
    if count == 0:
        return NO_PREFIX
    base = max(count * block_size - window, 0) // block_size
    held = [window_pool.find(key) for key in keys[base:count]]
    return Prefix(
        tokens=count * block_size,
        blocks=tuple(blocks[:count]),
        window_blocks=tuple(block for block in held if block is not None),
        window_base=base,
    )


def _windowed_prefix(keys: Sequence[bytes], window_pool: BlockPool, *, block_size: int, window: int) -> int:
    """The largest number of leading blocks whose last ``window`` tokens all lie in cached window blocks."""
    needed = -(-window // block_size)  # whole blocks that cover a window which ends at a block's edge
    for count in range(len(keys), 0, -1):
        base = max(count - needed, 0)
        # from the far end, so that a missing block rules out a hit after one look-up in the common case
        if all(window_pool.find(key) is not None for key in reversed(keys[base:count])):
            return count
    return 0


def with_transferred(hit: Prefix, tokens: int, *, block_size: int, window: int) -> Prefix:
    """``hit`` and, behind it, records from outside up to ``tokens``: windows come with them, so nothing is replayed.

    Of the window blocks that ``hit`` holds, those stay which the last ``window`` of ``tokens`` reach into.
    """
    assert tokens > hit.tokens and not hit.replay, (tokens, hit)
    base = max(tokens - window, 0) // block_size
    return Prefix(
        tokens=tokens,
        blocks=hit.blocks,
        window_blocks=hit.window_blocks[base - hit.window_base :],
        window_base=base,
        transferred=tokens - hit.tokens,
    )
