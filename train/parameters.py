"""Trainable weights: fp32 masters stacked by kind, and the same as weights under their released names.

A stack holds one kind of tensor of all layers (and experts) that have it, so that quantisers and Muon work on few large
tensors. Takes a ModelConfig; gives initial values, optimiser groups, weights by name, and fake quantisation with
straight-through gradients. Knows nothing of data or of the forward.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig, Role
from flashstep.quant import fp8_block, mxfp4, mxfp8

FP8, FP4, ROWS8, BF16, F32 = "fp8 blocks", "fp4 rows", "fp8 rows", "bf16", "f32"
MUON, ADAM, ADAM_FAST, FIXED = "muon", "adam", "adam fast", "fixed"
PARTS = ("w1", "w3", "w2")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A stack: the released names of its members in order, one member's shape, its storage and its optimiser."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    storage: str
    optimiser: str
    start: Callable[[Tensor], Tensor]  # fills an fp32 tensor [len(names), *shape]


def normal(scale: float, fan_in: int) -> Callable[[Tensor], Tensor]:
    """A start with standard deviation scale / sqrt(fan_in)."""
    return lambda t: t.normal_(0, scale / math.sqrt(fan_in))


def _constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.fill_(value)


def _hc_base(streams: int, first: int) -> Callable[[Tensor], Tensor]:
    """Reads near one-hot on a different stream each site, post 1, mixing near the identity."""

    def fill(t: Tensor) -> Tensor:
        t.zero_()
        for layer in range(t.shape[0]):
            t[layer, :streams] = -1.1
            t[layer, (2 * layer + first) % streams] = 1.5
            t[layer, 2 * streams :] = 3 * torch.eye(streams, device=t.device).flatten()
        return t

    return fill


def kinds(c: ModelConfig) -> dict[str, Kind]:  # noqa: PLR0915 - one table, a line a stack
    """Every stack of the backbone, by a short key (spec/model.md 11)."""
    layers = c.layers
    d, streams = c.hidden_size, c.hc_mult
    every = [f"layers.{s.index}." for s in layers]
    full = [f"layers.{s.index}." for s in layers if s.role is Role.FULL]
    pairs = [f"layers.{s.index}." for s in layers if s.role is Role.FULL and s.ratio == 2]
    index = [f"layers.{s.index}." for s in layers if s.owns_selection]
    engram = [f"layers.{s.index}." for s in layers if s.has_engram]
    wide = c.num_attention_heads * c.head_dim
    index_width = c.index_n_heads * c.index_head_dim
    f, experts = c.moe_intermediate_size, c.n_routed_experts
    found: dict[str, Kind] = {}

    def add(
        key: str,
        where: list[str],
        shape: tuple[int, ...],
        storage: str,
        optimiser: str,
        start: Callable[[Tensor], Tensor],
    ) -> None:
        if where:
            found[key] = Kind(tuple(prefix + key for prefix in where), shape, storage, optimiser, start)

    def matrix(
        key: str,
        where: list[str],
        out: int,
        inner: int,
        storage: str,
        optimiser: str = MUON,
        scale: float = 1.0,
    ) -> None:
        add(key, where, (out, inner), storage, optimiser, normal(scale, inner))

    add("embed.weight", [""], (c.vocab_size, d), BF16, ADAM_FAST, normal(0.5, 1))
    matrix("head.weight", [""], c.vocab_size, d, BF16, ADAM, 0.5)
    add("norm.weight", [""], (d,), BF16, ADAM, _constant(1))
    for site, first in (("attn", 0), ("ffn", 1)):
        add(f"{site}_norm.weight", every, (d,), BF16, ADAM, _constant(1))
        add(
            f"hc_{site}_fn",
            every,
            (2 * streams + streams**2, streams * d),
            F32,
            ADAM,
            normal(1, streams * d),
        )
        add(f"hc_{site}_base", every, (2 * streams + streams**2,), F32, ADAM, _hc_base(streams, first))
        add(f"hc_{site}_scale", every, (3,), F32, ADAM, _constant(0.1))
    add("attn.attn_sink", every, (c.num_attention_heads,), F32, ADAM, _constant(0))
    matrix("attn.wq_a.weight", every, c.q_lora_rank, d, FP8)
    add("attn.q_norm.weight", every, (c.q_lora_rank,), BF16, ADAM, _constant(1))
    matrix("attn.wq_b.weight", every, wide, c.q_lora_rank, FP8)
    matrix("attn.wkv.weight", every, c.head_dim, d, FP8)
    add("attn.kv_norm.weight", every, (c.head_dim,), BF16, ADAM, _constant(1))
    matrix("attn.wo_a.weight", every, c.o_groups * c.o_lora_rank, wide // c.o_groups, FP8)
    matrix("attn.wo_b.weight", every, d, c.o_groups * c.o_lora_rank, FP8, MUON, 0.5)
    matrix("attn.compressor.wkv.weight", full, c.head_dim, d, BF16)
    matrix("attn.compressor.wgate.weight", pairs, c.head_dim, d, BF16)
    add("attn.compressor.norm.weight", full, (c.head_dim,), BF16, ADAM, _constant(1))
    matrix("attn.indexer.wq_b.weight", index, index_width, c.q_lora_rank, FP8)
    matrix("attn.indexer.weights_proj.weight", index, c.index_n_heads, d, BF16, ADAM)
    matrix("attn.indexer.wk.weight", full, c.index_head_dim, c.head_dim, BF16)
    add("attn.indexer.k_norm.weight", full, (c.index_head_dim,), BF16, ADAM, _constant(1))
    matrix("ffn.gate.weight", every, experts, d, BF16, ADAM)
    add("ffn.gate.bias", every, (experts,), F32, FIXED, _constant(0))
    add("ffn.gate.bias_vl", every, (experts,), F32, FIXED, _constant(0))
    for part in PARTS:
        shape = (d, f) if part == "w2" else (f, d)
        start = normal(0.5 if part == "w2" else 1.0, shape[1])
        routed = [f"{prefix}ffn.experts.{e}.{part}.weight" for prefix in every for e in range(experts)]
        found[f"ffn.experts.{part}"] = Kind(tuple(routed), shape, FP4, MUON, start)
        add(f"ffn.shared_experts.{part}.weight", every, shape, FP8, MUON, start)
    for prefix, rows in zip(engram, c.engram_num_embeddings, strict=True):
        add("engram.embed.weight", [prefix], (rows, c.engram_head_dim), ROWS8, ADAM_FAST, normal(0.5, 1))
        found[f"{prefix}engram.embed.weight"] = found.pop("engram.embed.weight")
    matrix(
        "engram.wkv.weight", engram, (streams + 1) * d, c.hash_columns * c.engram_head_dim, FP8, MUON, 0.25
    )
    add("engram.q_weight", engram, (streams, d), BF16, ADAM, _constant(1))
    add("engram.k_weight", engram, (streams, d), BF16, ADAM, _constant(1))
    return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def round_to_storage(stack: Tensor, storage: str) -> Tensor:
    """The values that the exported tensor will hold, fp32, same shape (rows of FP8 stacks are multiples of 32)."""
    if storage == F32:
        return stack
    if storage == BF16:
        return stack.bfloat16().float()
    if storage == FP8:
        return fp8_block.quantise_dequantise(stack.flatten(0, -2)).view_as(stack)
    return (mxfp4 if storage == FP4 else mxfp8).quantise_dequantise(stack)


class Parameters:
    """The masters. ``stacks[key]`` is an fp32 leaf [members, *shape]; ``table`` holds their kinds (None: the backbone's)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        device: torch.device,
        table: Mapping[str, Kind] | None = None,
    ) -> None:
        self.config = config
        self.kinds = kinds(config) if table is None else dict(table)
        generator = torch.Generator().manual_seed(seed)
        self.stacks: dict[str, Tensor] = {}
        for key, kind in self.kinds.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
                start = kind.start(torch.empty(len(kind.names), *kind.shape))
            self.stacks[key] = start.to(device).requires_grad_(kind.optimiser != FIXED)

    def keys(self, optimiser: str) -> list[str]:
        """Keys of the stacks of one optimiser, in order."""
        return [key for key, kind in self.kinds.items() if kind.optimiser == optimiser]

    def matrices(self, key: str, tensor: Tensor) -> Tensor:
        """``tensor`` (the stack ``key`` or its gradient) as the matrices that Muon sees: each output group is one."""
        return tensor.unflatten(1, (self.config.o_groups, -1)) if key == "attn.wo_a.weight" else tensor

    def values(self, *, quantised: bool) -> dict[str, Tensor]:
        """The stacks as the forward sees them: the masters, or their stored values with straight-through gradients."""
        if not quantised:
            return dict(self.stacks)
        return {
            key: stack
            if kind.storage == F32
            else _StraightThrough.apply(stack, round_to_storage(stack.detach(), kind.storage))
            for (key, stack), kind in zip(self.stacks.items(), self.kinds.values(), strict=True)
        }

    def named(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights as ``oracle.model.forward`` takes them: released names, routed experts of a layer as one stack."""
        found: dict[str, Tensor] = {}
        for key, kind in self.kinds.items():
            if kind.storage == FP4:
                owners = list(dict.fromkeys(name.partition("ffn.experts.")[0] for name in kind.names))
                layers = values[key].unflatten(0, (len(owners), -1)).unbind(0)
                found.update({owner + key: part for owner, part in zip(owners, layers, strict=True)})
            else:
                found.update(zip(kind.names, values[key].unbind(0), strict=True))
        return found

    def packed(self) -> dict[str, tuple[Tensor, ...]]:
        """What a checkpoint stores of each stack, on the CPU: (data, E8M0 bytes), or the tensor alone."""
        found: dict[str, tuple[Tensor, ...]] = {}
        for key, kind in self.kinds.items():
            stack = self.stacks[key].detach()
            if kind.storage in (F32, BF16):
                found[key] = (
                    stack.to(torch.float32 if kind.storage == F32 else torch.bfloat16).cpu().clone(),
                )
                continue
            if kind.storage == FP8:
                data, scale = fp8_block.quantise(stack.flatten(0, -2))
                scale = scale.unflatten(0, (stack.shape[0], -1))
            else:
                data, scale = (mxfp4 if kind.storage == FP4 else mxfp8).quantise(stack)
            found[key] = (data.reshape(*stack.shape[:-1], -1).cpu(), scale.cpu())
        return found

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Start from dequantised weights of a checkpoint of the same shape (names as ``named`` gives them)."""
        with torch.no_grad():
            for name, view in self.named(self.stacks).items():
                view.copy_(weights[name])

    @property
    def count(self) -> int:
        """Number of trained values."""
        return sum(stack.numel() for stack in self.stacks.values())
