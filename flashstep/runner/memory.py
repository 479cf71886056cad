"""Memory before and after loading: what an engine will take, whether this machine has it, and which setting nearby fits.

Takes configurations, the cache budget and what the machine has; gives ``MemoryPlan``, refusals as ``ConfigError``, and planned
against measured. Opens no file and allocates nothing. Weights are as stored, which is how kernels keep them on a GPU (plain torch
expands them to float64); caches are exact; the workspace of a step is an estimate (``_workspace``).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from flashstep.cache.budget import CacheBudget, Share, plan_cache, weight_bytes
from flashstep.config.engine import EngineConfig
from flashstep.config.engram import EngramOptions, Place
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.kernels.device import memory_bytes
from flashstep.parallel.layout import DEP, TP, Layout
from flashstep.runner.histories import Slots
from flashstep.runner.routing import bytes_of

TABLES, WORKSPACE, CONTEXT = "Engram tables", "a step's workspace (estimate)", "CUDA context"
STATM = Path("/proc/self/statm")
FLOAT64 = 8
STORED = {
    "routed experts": 0.5 + 1 / 32,
    "mHC": 4.0,
    "routers": 2.0,
    "embedding and head": 2.0,
}  # bytes a value; else 1
RUNTIME = 1 << 30  # a CUDA context, its modules and the allocator's rounding
MIB = 1 << 20
SMALLEST_CHUNK = 512


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are there: of the host, and what is free on the device (None: the host is the device)."""

    host: int
    device_free: int | None

    @classmethod
    def here(cls, device: torch.device) -> "Machine":
        """This one."""
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(host=host, device_free=memory_bytes(device) if device.type == "cuda" else None)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes, in bytes: ``device`` by part, in order, and what lies on the host beside it."""

    device: dict[str, int]
    host: dict[str, int]
    budget: CacheBudget

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    layout: Layout,
    on_gpu: bool,
    budget: CacheBudget | None = None,
) -> MemoryPlan:
    """The plan of a rank whose view ``model`` is; ``ConfigError`` where no cache fits into what ``engine`` gives it."""
    budget = budget or plan_cache(model, engine)
    weights = weight_bytes(model, share_of(model, layout))
    tables = weights.pop(TABLES)
    if engine.speculative is None:
        weights.pop("drafter")
    if not on_gpu:
        weights = {name: round(count * FLOAT64 / STORED.get(name, 1.0)) for name, count in weights.items()}
    device = {f"weights: {name}": count for name, count in weights.items() if count}
    device["caches"] = budget.bytes
    device[WORKSPACE] = _workspace(model, engine)
    slots = engine.max_num_seqs * Slots.bytes_per_slot(budget.max_model_len, block_size=budget.block_size)
    device["expert routing"] = bytes_of(engine, model)
    host = {"block tables": slots}
    place = engine.engram.place("cuda" if on_gpu else "cpu")
    if place in (Place.DEVICE, Place.MEMORY):
        device[TABLES] = tables
    elif place in (Place.PINNED, Place.SHARED):
        host[TABLES] = tables
    if on_gpu:
        device["block tables"] = slots
        device[CONTEXT] = RUNTIME
    return MemoryPlan(
        device={name: count for name, count in device.items() if count}, host=host, budget=budget
    )


def share_of(model: ModelConfig, layout: Layout) -> Share:
    """What a rank of ``layout`` holds, for ``cache.budget``."""
    return Share(
        experts=layout.local_experts(model.n_routed_experts),
        draft_experts=layout.local_experts(model.dspark_n_routed_experts, replicas=False),
        engram_parts=layout.tensor_parts,
    )


def _workspace(m: ModelConfig, engine: EngineConfig) -> int:
    """The largest step's tensors: streams and their update, queries and outputs of all heads, the experts' pairs, logits."""
    rows = engine.max_num_batched_tokens
    streams = 3 * m.hc_mult * m.hidden_size
    attention = 3 * m.num_attention_heads * m.head_dim
    # of a pair: its row in one byte a value (the experts' E4M3 tiles), what comes between, what comes out
    pairs = m.num_experts_per_tok * (m.hidden_size + m.hidden_size // 2 + m.moe_intermediate_size)
    shared = 3 * m.moe_intermediate_size + 3 * m.hidden_size
    verified = 1 if engine.speculative is None else 1 + m.dspark_block_size
    logits = 2 * 4 * min(engine.max_num_seqs * verified, rows) * m.vocab_size
    return 2 * rows * (streams + attention + pairs + shared) + logits


# ---- does it fit -----------------------------------------------------------------------------------------------------


def check_memory(
    plan: MemoryPlan, model: ModelConfig, engine: EngineConfig, *, layout: Layout, machine: Machine
) -> None:
    """``ConfigError`` if this machine cannot hold ``plan``: why not, and the nearest setting that it can hold."""
    reasons = list(_shortages(plan, machine))
    if not reasons:
        return
    advice = _nearest(model, engine, layout=layout, machine=machine)
    raise ConfigError("the memory plan", [f"{'; '.join(reasons)}. {advice}"])


def _shortages(plan: MemoryPlan, machine: Machine) -> Iterator[str]:
    on_host = plan.host_bytes
    if machine.device_free is None:
        on_host += plan.device_bytes
    elif plan.device_bytes > machine.device_free:
        need = f"{_size(plan.device_bytes)} ({_largest(plan.device)})"
        yield f"the device has {_size(machine.device_free)} free, and the plan needs {need}"
    if on_host > machine.host:
        parts = plan.host if machine.device_free is not None else {**plan.host, **plan.device}
        yield f"this machine has {_size(machine.host)}, and the plan needs {_size(on_host)} of it ({_largest(parts)})"


def _nearest(model: ModelConfig, engine: EngineConfig, *, layout: Layout, machine: Machine) -> str:
    """The first of ever larger changes that fits, as a sentence with its flags."""
    for variant in _variants(engine, on_gpu=machine.device_free is not None):
        fitted = _with_less_cache(model, variant, layout=layout, machine=machine)
        if fitted is not None:
            return f"Nearest that fits: {' '.join(_flags(engine, fitted))}"
    smaller = _smaller_rank(model, engine, layout=layout, machine=machine)
    if smaller is not None:
        rank = f"--load-format dummy --emulate {smaller}:0"
        return f"No setting fits the whole model here; one rank of {smaller} would: {rank}"
    return (
        "No setting fits this model here; lower kv_cache_memory_bytes, num_gpu_blocks_override or max_num_seqs, or take a "
        "larger machine"
    )


def _variants(engine: EngineConfig, *, on_gpu: bool) -> Iterator[EngineConfig]:
    """``engine``, then with the Engram tables further away, each also with smaller steps and fewer requests."""
    places = [engine.engram]
    if on_gpu:
        places.append(EngramOptions())
    elif engine.load_format != "dummy":
        places.append(EngramOptions(dp_shared_memory=True))  # mapped
    for engram in dict.fromkeys(places):
        placed = msgspec.structs.replace(engine, engram=engram)
        while True:
            yield placed
            if placed.max_num_batched_tokens <= SMALLEST_CHUNK and placed.max_num_seqs == 1:
                break
            placed = msgspec.structs.replace(
                placed,
                max_num_batched_tokens=max(
                    placed.max_num_batched_tokens // 2, min(SMALLEST_CHUNK, placed.max_num_batched_tokens)
                ),
                max_num_seqs=max(placed.max_num_seqs // 2, 1),
            )


def _with_less_cache(
    model: ModelConfig, engine: EngineConfig, *, layout: Layout, machine: Machine
) -> EngineConfig | None:
    """``engine`` with as much cache as fits, if that is enough for a request of the length that it asks for."""
    on_gpu = machine.device_free is not None
    try:
        if _fits(plan_memory(model, engine, layout=layout, on_gpu=on_gpu), machine):
            return engine
        if engine.num_blocks_override is not None:
            engine = msgspec.structs.replace(engine, num_blocks_override=None)
        least = plan_memory(
            model,
            msgspec.structs.replace(engine, kv_cache_memory_bytes=1 << 50),
            layout=layout,
            on_gpu=on_gpu,
        )
        there = machine.host - least.host_bytes if machine.device_free is None else machine.device_free
        left = there - (least.device_bytes - least.budget.bytes)
        if left < MIB:
            return None
        engine = msgspec.structs.replace(
            engine, kv_cache_memory_bytes=min(left // MIB * MIB, engine.cache_bytes)
        )
        fits = _fits(plan_memory(model, engine, layout=layout, on_gpu=on_gpu), machine)
    except ConfigError:  # what is left holds no request
        return None
    return engine if fits else None


def _fits(plan: MemoryPlan, machine: Machine) -> bool:
    return not list(_shortages(plan, machine))


def _smaller_rank(
    model: ModelConfig, engine: EngineConfig, *, layout: Layout, machine: Machine
) -> str | None:
    """The smallest layout one of whose ranks fits, Engram tables left aside (an emulated rank has small ones)."""
    if layout.size > 1:
        return None
    for size in (2, 4, 8, 16, 32, 64):
        for kind in (TP, DEP):
            smaller = Layout(kind=kind, size=size)
            try:
                view = smaller.view(model)
            except ConfigError:
                continue
            tableless = msgspec.structs.replace(view, engram_layer_ids=(), engram_num_embeddings=())
            if _with_less_cache(tableless, engine, layout=smaller, machine=machine) is not None:
                return f"{kind}{size}"
    return None


def _flags(before: EngineConfig, after: EngineConfig) -> Iterator[str]:
    """What must be said on the command line to come from one to the other."""
    names = {"num_blocks_override": "num_gpu_blocks_override"}
    for name in msgspec.structs.fields(EngineConfig):
        old, new = getattr(before, name.name), getattr(after, name.name)
        if old != new:
            flag = "--" + names.get(name.name, name.name).replace("_", "-")
            if isinstance(new, EngramOptions):
                yield f"--engram-config '{new.text}'"
            else:
                yield f"without {flag}" if new is None else f"{flag} {new}"


# ---- planned and measured --------------------------------------------------------------------------------------------


def allocated_bytes(device: torch.device) -> int:
    """What this process holds: on a GPU its tensors' bytes, on the host its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loaded_bytes(plan: MemoryPlan) -> int:
    """What ``plan`` says is there behind loading: all but what steps make, and what is no tensor."""
    return sum(count for name, count in plan.device.items() if name not in (WORKSPACE, CONTEXT))


def lines(plan: MemoryPlan, machine: Machine) -> list[str]:
    """``plan`` as text, and what there is for it."""
    on_gpu = machine.device_free is not None
    free = f"{_size(machine.device_free)} free on the device, " if machine.device_free is not None else ""
    head = f"Memory when it runs: {free}{_size(machine.host)} on the host"
    text = [head, *(f"  {name:<40}{_size(count):>14}" for name, count in plan.device.items())]
    text.append(f"  {'total' if on_gpu else 'subtotal':<40}{_size(plan.device_bytes):>14}")
    return [
        *text,
        *(f"  {name + ' (host)':<40}{_size(count):>14}" for name, count in plan.host.items() if count),
    ]


def comparison(plan: MemoryPlan, *, measured: int) -> str:
    """What was ``measured`` behind loading, beside what was planned for it."""
    planned = loaded_bytes(plan)
    return f"behind loading: {_size(planned)} planned, {_size(measured)} measured ({measured / planned - 1:+.1%})"


def _largest(parts: dict[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {_size(count)}" for name, count in ordered)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
