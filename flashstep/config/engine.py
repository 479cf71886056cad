"""One engine: which checkpoint, how much memory, which limits. The server and the offline commands both build from this."""

from pathlib import Path

import msgspec

from flashstep.config.cache import HitPolicy
from flashstep.config.speculative import SpeculativeOptions

LOAD_FORMATS = ("auto", "dummy")
ENGRAM_TABLES = ("memory", "mmap", "pinned")
SCHEDULING_POLICIES = ("fcfs", "priority")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``runner.build`` needs to make an engine.

    ``max_model_len`` None takes the checkpoint's ``max_position_embeddings``, or less if the cache holds less.
    ``kv_cache_memory_bytes`` is shared by the block pools (``cache.budget``); ``num_blocks_override`` sets the global block count
    directly (tests, and users who know). ``engram_table`` says where Engram rows live: loaded into memory, memory-mapped on
    disk, or in pinned host memory. ``seed`` makes dummy weights and the seeds of unseeded requests repeatable.
    ``speculative`` None decodes one token a step; else the checkpoint's draft layers are loaded and used.
    """

    model: Path
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    block_size: int = 32
    kv_cache_memory_bytes: int = 1 << 30
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    hit_policy: HitPolicy = HitPolicy.EXACT
    engram_table: str = "memory"
    speculative: SpeculativeOptions | None = None
    device: str = "auto"  # "cpu", "cuda", or "auto": a CUDA device where there is one
    kernels: str = "auto"  # "auto" or "reference"; one op is forced by "reference:<family>.<op>"
