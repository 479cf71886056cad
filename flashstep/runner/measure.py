"""What the caches of a GPU may take: its memory, less what is loaded and what the largest steps need for a moment, measured.

``expected`` says it by arithmetic, so that what cannot fit is refused before anything is loaded; ``measured`` runs the largest
prompt step and the largest step of decoding over a small pool, once the model stands. Both give the configuration with the bytes
of its caches filled in. Suffixes: see ``model.batch``.
"""

import msgspec
import torch

from flashstep.cache.pool import CachePool
from flashstep.config.engine import DEFAULT_CACHE_BYTES, EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.kernels.device import memory_bytes, total_memory_bytes
from flashstep.model.batch import DraftBatch, ForwardBatch
from flashstep.model.transformer import Transformer
from flashstep.parallel.layout import Layout
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.decode import sizes
from flashstep.runner.histories import Slots
from flashstep.runner.memory import MIB, plan_memory
from flashstep.sampling.sampler import CHUNK_BYTES

SMALL_POOL = 256  # blocks of each kind at most, to measure over
GRAPH_BYTES = (
    12 << 20
)  # of a captured graph, besides the tensors that all graphs share: launches and their arguments
SAMPLING = 8  # chunks of logits that the host's sampler has at once: noise, masks, sorted ones
MARGIN = 1.1  # allocators round up and leave holes


def measures(engine: EngineConfig, *, on_gpu: bool) -> bool:
    """Whether what the caches take is found by measuring: nobody has said it."""
    return on_gpu and engine.kv_cache_memory_bytes is None and engine.num_blocks_override is None


def expected(model: ModelConfig, engine: EngineConfig, *, layout: Layout, free_bytes: int) -> EngineConfig:
    """``engine`` with the cache that its share of a GPU, of which ``free_bytes`` are free, should leave.

    Never less than the default: what does not fit is for ``check_memory`` to say.
    """
    plenty = msgspec.structs.replace(engine, kv_cache_memory_bytes=1 << 50)
    plan = plan_memory(model, plenty, layout=layout, on_gpu=True)
    left = int(engine.gpu_memory_utilization * free_bytes) - (plan.device_bytes - plan.budget.bytes)
    return msgspec.structs.replace(engine, kv_cache_memory_bytes=max(left // MIB * MIB, DEFAULT_CACHE_BYTES))


@torch.inference_mode()
def measured(
    model: ModelConfig,
    engine: EngineConfig,
    transformer: Transformer,
    pool: CachePool,
    *,
    batches: BatchBuilder,
) -> EngineConfig:
    """``engine`` with the cache that is left on the GPU of ``pool``, over which ``transformer`` was built."""
    device = pool.device
    longest = engine.max_model_len or model.max_position_embeddings
    drafts = (
        transformer.draft.width if transformer.draft is not None and engine.speculative is not None else 0
    )
    pool.clear()
    chunk = min(engine.max_num_batched_tokens, longest)
    step = _rows(model, pool, batches, requests=1, rows=chunk, context=longest - chunk, wanted=1)
    decoding = _rows(
        model,
        pool,
        batches,
        requests=engine.max_num_seqs,
        rows=1 + drafts,
        context=max(longest - 2 - drafts, 0),
        wanted=engine.max_num_seqs * (1 + drafts),
    )
    of_prompts = _peak(transformer, step, device)
    of_decoding = _peak(transformer, decoding, device)
    tables = Slots.bytes_per_slot(longest, block_size=engine.block_size) * (2 * engine.max_num_seqs + 1)
    graphs = 0 if engine.enforce_eager else of_decoding + 2 * len(sizes(engine.max_num_seqs)) * GRAPH_BYTES
    torch.cuda.empty_cache()
    total = total_memory_bytes(device)
    taken = total - memory_bytes(device) - pool.total_bytes
    left = int(engine.gpu_memory_utilization * total) - taken - tables
    left -= int(MARGIN * max(of_prompts, of_decoding)) + int(MARGIN * graphs) + SAMPLING * CHUNK_BYTES
    return msgspec.structs.replace(engine, kv_cache_memory_bytes=max(left // MIB * MIB, MIB))


def _peak(transformer: Transformer, batch: ForwardBatch, device: torch.device) -> int:
    """Bytes that a step takes for a moment: the forward, its logits, and the draft behind it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits_TV = transformer.forward(batch)
    if transformer.draft is not None:
        requests = batch.slot_R.shape[0]
        transformer.draft.propose(
            DraftBatch(
                anchor_R=torch.zeros(requests, dtype=torch.int64, device=device),
                position_R=torch.ones(requests, dtype=torch.int64, device=device),
                window_table_RB=batch.window_table_RB,
                window_start_R=batch.window_start_R,
            )
        )
    del logits_TV
    return torch.cuda.max_memory_allocated(device) - before


def _rows(
    model: ModelConfig,
    pool: CachePool,
    batches: BatchBuilder,
    *,
    requests: int,
    rows: int,
    context: int,
    wanted: int,
) -> ForwardBatch:
    """``rows`` rows of each of ``requests`` behind ``context`` tokens, in blocks that all share; ``wanted`` give logits."""
    device, count = pool.device, requests * rows
    columns = -(-(context + rows) // pool.block_size)
    column_B = torch.arange(columns, device=device)
    return ForwardBatch(
        input_ids_T=torch.zeros(count, dtype=torch.int64, device=device),
        positions_T=(context + torch.arange(rows, device=device)).repeat(requests),
        request_T=torch.arange(requests, device=device).repeat_interleave(rows),
        slot_R=torch.arange(requests, device=device),
        block_table_RB=(column_B % pool.num_blocks).repeat(requests, 1),
        window_table_RB=(column_B % pool.num_window_blocks).repeat(requests, 1),
        window_start_R=torch.zeros(requests, dtype=torch.int64, device=device),
        store_T=torch.ones(count, dtype=torch.bool, device=device),
        lookback_TN=torch.full((count, batches.lookback), batches.pad, dtype=torch.int64, device=device),
        logit_rows=torch.arange(count - wanted, count, device=device),
    )
