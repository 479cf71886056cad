"""How KV memory is cut into blocks, and what a prefix hit may change."""

import enum

import msgspec


class HitPolicy(enum.Enum):
    """What a prefix-cache hit is allowed to change (spec/model.md 9).

    EXACT: window records are cached too, and a hit continues from them: the output is that of a cold run.
    BOUNDED: only global KV is cached; the last ``sliding_window`` tokens of a hit are recomputed with nothing before
    them visible in their windows, and layers past the last KV source run on the last rows only. An approximation.
    """

    EXACT = "exact"
    BOUNDED = "bounded"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The block pools.

    ``block_size`` tokens a block, even (a ratio-2 group never straddles a block). ``num_blocks`` global blocks and
    ``num_window_blocks`` window blocks exist; ``cache.budget`` computes both from memory.
    """

    block_size: int = 32
    num_blocks: int
    num_window_blocks: int
    enable_prefix_caching: bool = True
    hit_policy: HitPolicy = HitPolicy.EXACT
