"""The model configuration: ``config.json`` of a released checkpoint, read once and checked as a whole.

Takes the JSON text or mapping of the checkpoint; gives a frozen ``ModelConfig`` with the static role of every
layer. Unknown keys, missing keys, wrong types and broken rules are all reported together (``ConfigError``).
Knows nothing of tensors, caches or deployment. Field names are the checkpoint's own (``text_config``).
"""

import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json

ROUTER_SCORE = "sqrtsoftplus"
WEIGHT_BLOCK = 32  # FP8 weights carry one E8M0 scale for each 32 x 32 block
MX_GROUP = 32  # MXFP4 / MXFP8 group along the input channels
NV_GROUP = 16  # NVFP4 group along the head channels
DEFAULT_GATE_TEMPERATURE = 1.0  # "gate_temp" is absent from the released file


class Role(enum.Enum):
    """What a layer does with compressed KV (paper words)."""

    WINDOW = "window"  # reads only its own sliding window
    FULL = "full"  # owns a compressor, index keys and an indexer
    REINDEX = "reindex"  # scores its own selection over another layer's entries
    REUSE = "reuse"  # takes entries and selection from earlier layers unchanged


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The static role of one layer.

    ``ratio`` is tokens per compressed entry (0: window only). ``kv_source`` and ``index_source`` are the layers whose
    entries and selection this layer reads (its own index when it is the source, None when window only).
    """

    index: int
    role: Role
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    uses_candidates: bool
    has_engram: bool

    @property
    def owns_entries(self) -> bool:
        return self.role is Role.FULL

    @property
    def owns_selection(self) -> bool:
        return self.role in (Role.FULL, Role.REINDEX)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YaRN parameters of the compressed layers (spec/model.md 3.2)."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The text backbone and its drafter, exactly as ``text_config`` names them, plus the special token ids."""

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    gate_temp: float = DEFAULT_GATE_TEMPERATURE

    # ---- reading -------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """Read ``config.json`` at ``path`` (the file or the checkpoint's folder)."""
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise ConfigError(str(file), ["the file does not exist; a checkpoint folder holds a config.json"])
        return cls.parse(read_json(file), subject=str(file))

    @classmethod
    def parse(cls, data: Mapping[str, Any], *, subject: str = "config.json") -> "ModelConfig":
        """Build the configuration from the nested mapping of ``config.json``; raise ``ConfigError`` with all problems."""
        if not isinstance(data, Mapping) or not isinstance(data.get("text_config"), Mapping):
            raise ConfigError(
                subject, ["it has no text_config object; expected the released nested config.json"]
            )
        problems = _check_envelope(data)
        values, unreadable = _read_fields(cls, _text_fields(data))
        problems += unreadable
        if problems:
            raise ConfigError(subject, problems)
        config = cls(**values)
        broken = config.broken_rules()
        if broken:
            raise ConfigError(subject, broken)
        return config

    # ---- derived -------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The static role of each backbone layer, in order (spec/model.md 1.2)."""
        specs = []
        for index in range(self.num_hidden_layers):
            ratio = self.compress_ratios[index]
            kv_source = (
                max((s for s in self.kv_source_layer_ids if s <= index), default=None) if ratio else None
            )
            index_source = (
                max((s for s in self.index_source_layer_ids if s <= index), default=None) if ratio else None
            )
            if ratio == 0:
                role = Role.WINDOW
            elif kv_source == index:
                role = Role.FULL
            elif index_source == index:
                role = Role.REINDEX
            else:
                role = Role.REUSE
            candidate = self.candidate_source_layer_id
            specs.append(
                LayerSpec(
                    index=index,
                    role=role,
                    ratio=ratio,
                    kv_source=kv_source,
                    index_source=index_source,
                    is_candidate_source=index == candidate,
                    uses_candidates=0 <= candidate < index and role in (Role.FULL, Role.REINDEX),
                    has_engram=index in self.engram_layer_ids,
                )
            )
        return tuple(specs)

    @property
    def nope_dim(self) -> int:
        """Channels of a head before the rotary tail."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def hash_columns(self) -> int:
        """Engram rows gathered for each token and Engram layer: (max n-gram - 1) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def last_kv_source(self) -> int | None:
        """The deepest layer that writes global KV: what follows it needs only the window (spec/model.md 9)."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None

    def broken_rules(self) -> list[str]:
        """Every validity rule that this configuration breaks, as sentences (spec/model.md 1.2 and 13)."""
        return [
            *_number_rules(self),
            *_rope_rules(self),
            *_shape_rules(self),
            *_schedule_rules(self),
            *_engram_rules(self),
            *_token_rules(self),
            *_draft_rules(self),
        ]


TOP_LEVEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
IGNORED_TEXT_KEYS = frozenset(
    # facts that carry no choice of ours: training-time settings, and constants that other exporters add
    {
        "model_type",
        "attention_dropout",
        "use_cache",
        "tie_word_embeddings",
        "initializer_range",
        "dtype",
        "torch_dtype",
    }
)
EXPECTED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [WEIGHT_BLOCK, WEIGHT_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def _check_envelope(data: Mapping[str, Any]) -> list[str]:
    problems = []
    if data.get("model_type") != "deepseek_v41":
        problems.append(f"model_type is {data.get('model_type')!r}; flashstep serves only 'deepseek_v41'")
    quantization = data.get("quantization_config")
    if not isinstance(quantization, Mapping):
        problems.append(f"quantization_config is missing; expected {EXPECTED_QUANTIZATION}")
    else:
        problems += [
            f"quantization_config.{key} is {quantization.get(key)!r}; flashstep reads only {value!r}"
            for key, value in EXPECTED_QUANTIZATION.items()
            if quantization.get(key) != value
        ]
    if data["text_config"].get("tie_word_embeddings", False):
        problems.append(
            "text_config.tie_word_embeddings is true; this model's embed and head are separate tensors"
        )
    return problems


def _text_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``text_config`` that carry a choice, with the special token ids beside them."""
    text = {key: value for key, value in data["text_config"].items() if key not in IGNORED_TEXT_KEYS}
    if "engram_pad_id" in text and "engram_pad_token_id" not in text:
        text["engram_pad_token_id"] = text.pop("engram_pad_id")  # spelling of HF transformers
    return text | {key: data[key] for key in TOP_LEVEL_IDS if key in data}


def _read_fields(kind: type[ModelConfig], text: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of the fields of ``kind``, and what is unknown, missing or of the wrong type."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    problems = [f"text_config.{key} is unknown to this model" for key in sorted(text.keys() - fields.keys())]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in text:
            if field.required:
                place = name if name in TOP_LEVEL_IDS else f"text_config.{name}"
                problems.append(f"{place} is missing")
            continue
        try:
            values[name] = msgspec.convert(text[name], field.type)
        except msgspec.ValidationError as error:
            problems.append(f"text_config.{name}: {error} (got {text[name]!r})")
    return values, problems


def _number_rules(c: ModelConfig) -> list[str]:
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
        "o_lora_rank max_position_embeddings sliding_window n_routed_experts num_experts_per_tok moe_intermediate_size "
        "hc_mult hc_sinkhorn_iters swiglu_limit rope_theta compress_rope_theta routed_scaling_factor gate_temp "
        "rms_norm_eps hc_eps"
    ).split()
    rules = [
        f"{name} is {getattr(c, name)}; it must be positive and finite"
        for name in positive
        if not 0 < getattr(c, name) < math.inf
    ]
    if c.max_position_embeddings == 1:
        rules.append("max_position_embeddings is 1; a prompt token and an output token need 2")
    fixed = {
        "hidden_act": "silu",
        "scoring_func": ROUTER_SCORE,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "attention_bias": False,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }
    rules += [
        f"{name} is {getattr(c, name)!r}; this architecture has {value!r}"
        for name, value in fixed.items()
        if getattr(c, name) != value
    ]
    if c.num_experts_per_tok > c.n_routed_experts:
        rules.append(
            f"num_experts_per_tok ({c.num_experts_per_tok}) exceeds n_routed_experts ({c.n_routed_experts}); choose fewer"
        )
    return rules


def _rope_rules(c: ModelConfig) -> list[str]:
    """What YaRN's ramp divides by, or takes the logarithm of (spec/model.md 3.2)."""
    yarn = c.rope_scaling
    rules = []
    if yarn.rope_type != "yarn":
        rules.append(f"rope_scaling.rope_type is {yarn.rope_type!r}; this architecture has 'yarn'")
    if not 1 <= yarn.factor < math.inf or yarn.original_max_position_embeddings < 1:
        rules.append("rope_scaling needs a finite factor >= 1 and original_max_position_embeddings >= 1")
    if not 0 < yarn.beta_slow <= yarn.beta_fast < math.inf:
        rules.append(
            f"rope_scaling has beta_fast {yarn.beta_fast} and beta_slow {yarn.beta_slow}; "
            "it needs 0 < beta_slow <= beta_fast"
        )
    if 0 < c.compress_rope_theta <= 1:
        rules.append(f"compress_rope_theta is {c.compress_rope_theta}; it must exceed 1")
    return rules


def _shape_rules(c: ModelConfig) -> list[str]:
    rules = []
    widths = {
        "hidden_size": c.hidden_size,
        "head_dim": c.head_dim,
        "q_lora_rank": c.q_lora_rank,
        "moe_intermediate_size": c.moe_intermediate_size,
        "o_groups * o_lora_rank": c.o_groups * c.o_lora_rank,
    }
    if c.kv_source_layer_ids:
        widths["index_head_dim"] = c.index_head_dim
    if c.engram_layer_ids:
        widths["engram_head_dim"] = c.engram_head_dim
    rules += [
        f"{name} is {width}; every quantised width must be a multiple of {MX_GROUP}"
        for name, width in widths.items()
        if width < 1 or width % MX_GROUP
    ]
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        rules.append(
            f"qk_rope_head_dim is {c.qk_rope_head_dim}; it must be even and at most head_dim ({c.head_dim})"
        )
    if c.kv_source_layer_ids and c.qk_rope_head_dim > c.index_head_dim:
        rules.append(f"qk_rope_head_dim ({c.qk_rope_head_dim}) exceeds index_head_dim ({c.index_head_dim})")
    if c.o_groups > 0 and c.num_attention_heads % c.o_groups:
        rules.append(
            f"num_attention_heads ({c.num_attention_heads}) is not a multiple of o_groups ({c.o_groups})"
        )
    elif c.o_groups > 0 and (c.num_attention_heads * c.head_dim // c.o_groups) % MX_GROUP:
        rules.append("num_attention_heads * head_dim / o_groups must be a multiple of 32")
    return rules


def _schedule_rules(c: ModelConfig) -> list[str]:
    rules = []
    expected = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != expected:
        return [
            f"compress_ratios has {len(c.compress_ratios)} entries; it needs {expected} "
            f"(num_hidden_layers {c.num_hidden_layers} + num_nextn_predict_layers {c.num_nextn_predict_layers})"
        ]
    rules += [
        f"compress_ratios[{i}] is {r}; allowed are 0, 1 and 2"
        for i, r in enumerate(c.compress_ratios)
        if r not in (0, 1, 2)
    ]
    rules += [
        f"compress_ratios[{i}] is {c.compress_ratios[i]}; draft layers read only their window, so it must be 0"
        for i in range(c.num_hidden_layers, expected)
        if c.compress_ratios[i] != 0
    ]
    for name, ids in (
        ("kv_source_layer_ids", c.kv_source_layer_ids),
        ("index_source_layer_ids", c.index_source_layer_ids),
    ):
        if list(ids) != sorted(set(ids)):
            rules.append(f"{name} {list(ids)} must be strictly ascending")
        rules += [
            f"{name} names layer {i}, which is window-only or outside the {c.num_hidden_layers} layers"
            for i in ids
            if not 0 <= i < c.num_hidden_layers or c.compress_ratios[i] == 0
        ]
    rules += [
        f"layer {s} is a KV source but not an index source; every KV source must also be in index_source_layer_ids"
        for s in c.kv_source_layer_ids
        if s not in c.index_source_layer_ids
    ]
    for index, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        source = max((s for s in c.kv_source_layer_ids if s <= index), default=None)
        if not ratio:
            continue
        if source is None:
            rules.append(f"layer {index} has ratio {ratio} but no KV source at or before it")
        elif 0 <= source < c.num_hidden_layers and c.compress_ratios[source] != ratio:
            rules.append(
                f"layer {index} has ratio {ratio} but its KV source {source} has {c.compress_ratios[source]}"
            )
    return rules + _selection_rules(c)


def _selection_rules(c: ModelConfig) -> list[str]:
    if not c.kv_source_layer_ids:
        return ["candidate_source_layer_id needs a KV source"] if c.candidate_source_layer_id >= 0 else []
    rules = [
        f"{name} is {value}; it must be positive"
        for name, value in (
            ("index_topk", c.index_topk),
            ("index_n_heads", c.index_n_heads),
            ("index_head_dim", c.index_head_dim),
        )
        if value < 1
    ]
    candidate = c.candidate_source_layer_id
    if candidate < 0:
        return rules
    if candidate not in c.kv_source_layer_ids:
        rules.append(
            f"candidate_source_layer_id {candidate} is not one of kv_source_layer_ids {list(c.kv_source_layer_ids)}"
        )
    later = [s for s in c.kv_source_layer_ids if s > candidate]
    if later:
        rules.append(
            f"KV sources {later} follow candidate source {candidate}; its blocks speak only of its own entries"
        )
    if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1:
        rules.append("candidate_topk_blocks and candidate_block_size must be positive")
    elif c.candidate_topk_blocks * c.candidate_block_size < c.index_topk + c.candidate_block_size:
        rules.append(
            f"the candidate pool ({c.candidate_topk_blocks} blocks x {c.candidate_block_size}) is below "
            f"index_topk + candidate_block_size ({c.index_topk + c.candidate_block_size}); enlarge candidate_topk_blocks"
        )
    return rules


def _engram_rules(c: ModelConfig) -> list[str]:
    if not c.engram_layer_ids:
        return []
    rules = []
    if list(c.engram_layer_ids) != sorted(set(c.engram_layer_ids)):
        rules.append(f"engram_layer_ids {list(c.engram_layer_ids)} must be strictly ascending")
    rules += [
        f"engram_layer_ids names layer {i}, outside the {c.num_hidden_layers} layers"
        for i in c.engram_layer_ids
        if not 0 <= i < c.num_hidden_layers
    ]
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        rules.append("engram_num_embeddings needs one entry for each of engram_layer_ids")
    if c.engram_max_ngram_size < 2 or c.engram_n_heads < 1 or c.engram_vocab_size < 2:
        rules.append(
            "engram needs engram_max_ngram_size >= 2, engram_n_heads >= 1 and engram_vocab_size >= 2"
        )
    if not 1 <= c.engram_compressed_vocab_size <= c.vocab_size:
        rules.append(
            f"engram_compressed_vocab_size is {c.engram_compressed_vocab_size}; allowed are 1 to vocab_size ({c.vocab_size})"
        )
    return rules


def _token_rules(c: ModelConfig) -> list[str]:
    ids = {name: getattr(c, name) for name in TOP_LEVEL_IDS}
    if c.engram_layer_ids:
        ids["engram_pad_token_id"] = c.engram_pad_token_id
    if c.num_nextn_predict_layers:
        ids["dspark_noise_token_id"] = c.dspark_noise_token_id
    return [
        f"{name} is {value}; token ids lie in 0..{c.vocab_size - 1}"
        for name, value in ids.items()
        if not 0 <= value < c.vocab_size
    ]


def _draft_rules(c: ModelConfig) -> list[str]:
    if c.num_nextn_predict_layers < 0:
        return ["num_nextn_predict_layers is negative"]
    if c.num_nextn_predict_layers == 0:
        return []
    rules = [
        f"dspark_target_layer_ids names layer {i}, outside the {c.num_hidden_layers} layers"
        for i in c.dspark_target_layer_ids
        if not 0 <= i < c.num_hidden_layers
    ]
    if not c.dspark_target_layer_ids:
        rules.append("dspark_target_layer_ids is empty; the drafter needs at least one target layer")
    if c.dspark_block_size < 1 or c.dspark_markov_rank < 1:
        rules.append("dspark_block_size and dspark_markov_rank must be positive")
    if not 1 <= c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts:
        rules.append("dspark_num_experts_per_tok must lie in 1..dspark_n_routed_experts")
    return rules
