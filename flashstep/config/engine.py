"""One engine: which checkpoint, how much memory, which limits. The server and the offline commands both build from this."""

from pathlib import Path

import msgspec

from flashstep.config.cache import HitPolicy
from flashstep.config.engram import EngramOptions
from flashstep.config.speculative import RejectionSampleMethod, SpeculativeOptions

LOAD_FORMATS = ("auto", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
ROUTINGS = ("real", "uniform", "recorded")
DEFAULT_CACHE_BYTES = 1 << 30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``runner.build`` needs to make an engine.

    ``max_model_len`` None takes the checkpoint's ``max_position_embeddings``, or less if the cache holds less.
    ``kv_cache_memory_bytes`` is shared by the block pools (``cache.budget``); None: on a GPU what is left of its share
    ``gpu_memory_utilization``, measured when the model is loaded (``runner.measure``), else ``DEFAULT_CACHE_BYTES``.
    ``num_blocks_override`` sets the global block count directly (tests, and users who know). ``engram`` says where Engram rows
    live; ``numa_bind`` keeps the process on the NUMA node of its GPU. ``seed`` makes dummy weights and the seeds of unseeded
    requests repeatable. ``emulate`` is a layout with a rank ("dep8:3", ``parallel.layout``): that rank alone is built, with dummy
    weights. ``speculative`` None decodes one token a step; else the checkpoint's draft layers are loaded and used.
    ``enforce_eager`` makes no CUDA graphs. ``batch_invariant`` leaves out kernels whose sums depend on how many rows stand side
    by side.

    For measuring, and making every text wrong: ``routing`` "uniform" or "recorded" puts other experts in the place of those that
    the router chose, recorded ones from the file ``expert_loads`` (``parallel.loads``); ``fill_cache`` admits prompts as if their
    cache had been handed over, with values that differ by ``fill_cache_std``. ``record_expert_loads`` is a file that each step's
    loads are written to; it changes no text.
    """

    model: Path
    load_format: str = "auto"
    emulate: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    hit_policy: HitPolicy = HitPolicy.EXACT
    engram: EngramOptions = EngramOptions()
    numa_bind: bool = False
    speculative: SpeculativeOptions | None = None
    device: str = "auto"  # "cpu", "cuda", or "auto": a CUDA device where there is one
    enforce_eager: bool = False
    batch_invariant: bool = False
    kernels: str = "auto"  # "auto" or "reference"; one op is forced by "reference:<family>.<op>"
    routing: str = "real"
    expert_loads: Path | None = None
    record_expert_loads: Path | None = None
    fill_cache: bool = False
    fill_cache_std: float = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches, as far as the configuration says it."""
        return DEFAULT_CACHE_BYTES if self.kv_cache_memory_bytes is None else self.kv_cache_memory_bytes

    @property
    def falsifies(self) -> tuple[str, ...]:
        """What makes its texts wrong on purpose, for measuring: "synthetic acceptance", "uniform routing", "filled cache", .."""
        drafts = self.speculative
        synthetic = drafts is not None and drafts.rejection_sample_method is RejectionSampleMethod.SYNTHETIC
        return (
            *(("synthetic acceptance",) if synthetic else ()),
            *((f"{self.routing} routing",) if self.routing != "real" else ()),
            *(("filled cache",) if self.fill_cache else ()),
        )
