"""Every tensor of a released checkpoint and the parameter of ours that it feeds (spec/model.md 11), both ways.

Owns names, shapes and dtypes, derived from the configuration alone; opens no file. Our name of a parameter is the stored name
but for these:

| stored                                              | dtype             | our parameter                                  |
|-----------------------------------------------------|-------------------|------------------------------------------------|
| N.weight [out, in]                                  | BF16              | N.weight                                       |
| N.weight [out, in] + N.scale [out/32, in/32]        | F8_E4M3 + F8_E8M0 | N.weight, an fp8_block QuantTensor             |
| L.ffn.experts.E.wK.weight [out, in/2] + .scale      | I8 + F8_E8M0      | L.ffn.experts.wK, MXFP4 QuantTensor, E stacked |
| layers.L.engram.embed.weight [rows, C] + .scale     | F8_E4M3 + F8_E8M0 | the Engram table of layer L (scales by row)    |
| L.hc_*, attn_sink, gate.bias, gate.bias_vl          | F32               | the same                                       |
| vision.*, aligner.*, image_start, _end, _newline    | -                 | recognised and skipped                         |

where L is ``layers.0`` .. or ``mtp.0`` .. (the drafter: checked with the rest, loaded only when asked for).
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from flashstep.config.model import MX_GROUP, WEIGHT_BLOCK, ModelConfig, Role
from flashstep.parallel.layout import WHOLE, Layout

BF16, F32, FP8, E8M0, PACKED_FP4 = "BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"  # as safetensors spells them
VISION_PREFIXES = ("vision.", "aligner.")
VISION_NAMES = frozenset({"image_start", "image_end", "image_newline"})
EXPERT_MATRICES = ("w1", "w2", "w3")


class Kind(enum.Enum):
    """How a parameter is stored."""

    BF16 = "bf16"
    F32 = "f32"
    FP8_BLOCK = "fp8_block"  # one scale for each 32 x 32 block
    FP4_EXPERTS = "fp4_experts"  # one pair of tensors an expert, scales by row
    ENGRAM_TABLE = "engram_table"  # FP8 rows, scales by row


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of a checkpoint: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of ours. ``shape`` is the logical one; experts are its first dimension where they are stacked."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def is_draft(self) -> bool:
        return self.name.startswith("mtp.")

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Its tensors in the checkpoint; values before scales, experts ascending."""
        if self.kind in (Kind.BF16, Kind.F32):
            dtype = BF16 if self.kind is Kind.BF16 else F32
            return (Stored(name=self.name, dtype=dtype, shape=self.shape),)
        if self.kind is Kind.FP4_EXPERTS:
            return tuple(_expert_pairs(self))
        rows, columns = self.shape
        scale_rows = rows if self.kind is Kind.ENGRAM_TABLE else -(-rows // WEIGHT_BLOCK)
        return (
            Stored(name=self.name, dtype=FP8, shape=self.shape),
            Stored(name=_scale_name(self.name), dtype=E8M0, shape=(scale_rows, -(-columns // WEIGHT_BLOCK))),
        )


def is_vision(name: str) -> bool:
    """Whether ``name`` belongs to the image tower, which flashstep recognises and skips."""
    return name in VISION_NAMES or name.startswith(VISION_PREFIXES)


def engram_table_name(layer: int) -> str:
    """Our name of an Engram table, which is also that of its stored values."""
    return f"layers.{layer}.engram.embed.weight"


def parameters(config: ModelConfig, layout: Layout = WHOLE) -> dict[str, Parameter]:
    """Every parameter of the model and its drafter by our name, in the order of the layers.

    Of a rank: ``config`` is its view (``Layout.view``), and the shapes are those of what it holds.
    """
    found = [
        Parameter(name="embed.weight", kind=Kind.BF16, shape=(config.vocab_size, config.hidden_size)),
        Parameter(name="head.weight", kind=Kind.BF16, shape=(config.vocab_size, config.hidden_size)),
        Parameter(name="norm.weight", kind=Kind.BF16, shape=(config.hidden_size,)),
    ]
    for spec in config.layers:
        prefix = f"layers.{spec.index}"
        experts = config.n_routed_experts
        found += _block(config, prefix, experts=experts, local=layout.local_experts(experts))
        found += _compressed(config, f"{prefix}.attn", role=spec.role, ratio=spec.ratio)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        found += _engram(config, layer, rows=rows, parts=layout.tensor_parts)
    found += _drafter(config, layout)
    return {parameter.name: parameter for parameter in found}


def stored_tensors(config: ModelConfig) -> dict[str, Stored]:
    """Every tensor that a checkpoint of ``config`` must hold (vision aside), by stored name."""
    return {stored.name: stored for parameter in parameters(config).values() for stored in parameter.stored}


def _scale_name(weight_name: str) -> str:
    return f"{weight_name.removesuffix('.weight')}.scale"


def _expert_pairs(parameter: Parameter) -> Iterator[Stored]:
    experts, out, inner = parameter.shape
    prefix, _, matrix = parameter.name.rpartition(".")
    for expert in range(experts):
        name = f"{prefix}.{expert}.{matrix}"
        yield Stored(name=f"{name}.weight", dtype=PACKED_FP4, shape=(out, inner // 2))
        yield Stored(name=f"{name}.scale", dtype=E8M0, shape=(out, inner // MX_GROUP))


def _block(c: ModelConfig, prefix: str, *, experts: int, local: int) -> Iterator[Parameter]:
    """What every layer has, whatever its role; of ``experts`` that the router knows, ``local`` are held."""
    coefficients = (2 + c.hc_mult) * c.hc_mult
    heads = c.num_attention_heads
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    for name, width in ((f"{prefix}.attn_norm", c.hidden_size), (f"{prefix}.ffn_norm", c.hidden_size)):
        yield Parameter(name=f"{name}.weight", kind=Kind.BF16, shape=(width,))
    for site in ("attn", "ffn"):
        yield Parameter(
            name=f"{prefix}.hc_{site}_fn", kind=Kind.F32, shape=(coefficients, c.hc_mult * c.hidden_size)
        )
        yield Parameter(name=f"{prefix}.hc_{site}_base", kind=Kind.F32, shape=(coefficients,))
        yield Parameter(name=f"{prefix}.hc_{site}_scale", kind=Kind.F32, shape=(3,))
    yield Parameter(name=f"{attn}.attn_sink", kind=Kind.F32, shape=(heads,))
    for name, width in (("q_norm", c.q_lora_rank), ("kv_norm", c.head_dim)):
        yield Parameter(name=f"{attn}.{name}.weight", kind=Kind.BF16, shape=(width,))
    for name, shape in (
        ("wq_a", (c.q_lora_rank, c.hidden_size)),
        ("wq_b", (heads * c.head_dim, c.q_lora_rank)),
        ("wkv", (c.head_dim, c.hidden_size)),
        ("wo_a", (c.o_groups * c.o_lora_rank, heads * c.head_dim // c.o_groups)),
        ("wo_b", (c.hidden_size, c.o_groups * c.o_lora_rank)),
    ):
        yield Parameter(name=f"{attn}.{name}.weight", kind=Kind.FP8_BLOCK, shape=shape)
    yield Parameter(name=f"{ffn}.gate.weight", kind=Kind.BF16, shape=(experts, c.hidden_size))
    for name in ("bias", "bias_vl"):
        yield Parameter(name=f"{ffn}.gate.{name}", kind=Kind.F32, shape=(experts,))
    for matrix in EXPERT_MATRICES:
        narrow, wide = c.moe_intermediate_size, c.hidden_size
        shape = (wide, narrow) if matrix == "w2" else (narrow, wide)
        yield Parameter(name=f"{ffn}.experts.{matrix}", kind=Kind.FP4_EXPERTS, shape=(local, *shape))
        yield Parameter(name=f"{ffn}.shared_experts.{matrix}.weight", kind=Kind.FP8_BLOCK, shape=shape)


def _compressed(c: ModelConfig, attn: str, *, role: Role, ratio: int) -> Iterator[Parameter]:
    """What a layer has for being a source."""
    if role is Role.FULL:
        yield Parameter(
            name=f"{attn}.compressor.wkv.weight", kind=Kind.BF16, shape=(c.head_dim, c.hidden_size)
        )
        if ratio == 2:
            yield Parameter(
                name=f"{attn}.compressor.wgate.weight", kind=Kind.BF16, shape=(c.head_dim, c.hidden_size)
            )
        yield Parameter(name=f"{attn}.compressor.norm.weight", kind=Kind.BF16, shape=(c.head_dim,))
        yield Parameter(
            name=f"{attn}.indexer.wk.weight", kind=Kind.BF16, shape=(c.index_head_dim, c.head_dim)
        )
        yield Parameter(name=f"{attn}.indexer.k_norm.weight", kind=Kind.BF16, shape=(c.index_head_dim,))
    if role in (Role.FULL, Role.REINDEX):
        shape = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield Parameter(name=f"{attn}.indexer.wq_b.weight", kind=Kind.FP8_BLOCK, shape=shape)
        shape = (c.index_n_heads, c.hidden_size)
        yield Parameter(name=f"{attn}.indexer.weights_proj.weight", kind=Kind.BF16, shape=shape)


def _engram(c: ModelConfig, layer: int, *, rows: int, parts: int) -> Iterator[Parameter]:
    yield Parameter(name=engram_table_name(layer), kind=Kind.ENGRAM_TABLE, shape=(rows, c.engram_head_dim))
    shape = ((c.hc_mult + 1) * c.hidden_size // parts, c.hash_columns * c.engram_head_dim)
    yield Parameter(name=f"layers.{layer}.engram.wkv.weight", kind=Kind.FP8_BLOCK, shape=shape)
    for name in ("q_weight", "k_weight"):
        yield Parameter(
            name=f"layers.{layer}.engram.{name}", kind=Kind.BF16, shape=(c.hc_mult, c.hidden_size)
        )


def _drafter(c: ModelConfig, layout: Layout) -> Iterator[Parameter]:
    stages, experts = c.num_nextn_predict_layers, c.dspark_n_routed_experts
    for stage in range(stages):
        yield from _block(
            c, f"mtp.{stage}", experts=experts, local=layout.local_experts(experts, replicas=False)
        )
    if stages == 0:
        return
    last = f"mtp.{stages - 1}"
    features = len(c.dspark_target_layer_ids) * c.hidden_size
    yield Parameter(name="mtp.0.main_proj.weight", kind=Kind.FP8_BLOCK, shape=(c.hidden_size, features))
    yield Parameter(name="mtp.0.main_norm.weight", kind=Kind.BF16, shape=(c.hidden_size,))
    yield Parameter(name=f"{last}.norm.weight", kind=Kind.BF16, shape=(c.hidden_size,))
    for side in ("embed", "head"):
        shape = (c.vocab_size, c.dspark_markov_rank)
        yield Parameter(name=f"{last}.markov_head.{side}.weight", kind=Kind.BF16, shape=shape)
    shape = (1, c.hidden_size + c.dspark_markov_rank)
    yield Parameter(name=f"{last}.confidence_head.proj.weight", kind=Kind.BF16, shape=shape)
