"""Reads a released checkpoint folder for the oracle, with its own reader and its own Engram token map.

Takes the folder (nested config.json, sharded safetensors with an index, tokenizer.json); gives the configuration, the
dequantised weights under the names that ``oracle.model.forward`` wants, and the token map. Vision tensors are skipped, the
draft's too unless they are asked for. Shares no code with the serving loader.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.quant import fp8_block, mxfp4, mxfp8

SKIPPED = ("vision.", "aligner.", "image_")
DRAFT = "mtp."
_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_MARK = "\ue000"  # stands for a lone space while both ends are stripped (spec/model.md 6.1)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What the oracle needs of a checkpoint; ``token_map`` is int64 [vocab], None without Engram layers."""

    config: ModelConfig
    weights: dict[str, Tensor]
    token_map: Tensor | None


def load(folder: Path, *, dtype: torch.dtype = torch.float32, draft: bool = False) -> Checkpoint:
    """Read ``folder``; dequantised weights are given in ``dtype`` (fp32 and bf16 hold them exactly), the draft's on request."""
    config = ModelConfig.read(folder)
    raw = _read_tensors(folder, SKIPPED if draft else (*SKIPPED, DRAFT))
    token_map = engram_token_map(folder / "tokenizer.json", config) if config.engram_layer_ids else None
    return Checkpoint(config=config, weights=_dequantise_all(raw, dtype), token_map=token_map)


def _read_tensors(folder: Path, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}  # a checkpoint of one file needs no index
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    tensors = {}
    for shard in sorted(shards):
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if not name.startswith(skipped):
                    tensors[name] = file.get_tensor(name)
    return tensors


def _dequantise_all(raw: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix("weight") + "scale")
        expert = _EXPERT.fullmatch(name)
        if expert:
            assert scale is not None, f"{name} has no scale"
            value = mxfp4.dequantise(tensor, scale.view(torch.uint8), dtype=dtype)
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = value
        elif scale is None:
            weights[name] = tensor.to(dtype)
        elif name.endswith(
            "engram.embed.weight"
        ):  # a table, not a matrix: scales stand for each row, each 32 channels
            weights[name] = mxfp8.dequantise(tensor, scale.view(torch.uint8), dtype=dtype)
        else:
            weights[name] = fp8_block.dequantise(tensor, scale.view(torch.uint8), dtype=dtype)
    for name, parts in experts.items():
        weights[name] = torch.stack([parts[i] for i in range(len(parts))])
    return weights


def engram_token_map(tokenizer_file: Path, config: ModelConfig) -> Tensor:
    """int64 [vocab]: compressed id of every token id, by spec/model.md 6.1; refused if the number of keys is not the config's."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _MARK),
            normalizers.Strip(),
            normalizers.Replace(_MARK, " "),
        ]
    )
    keys: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        raw = tokenizer.id_to_token(token) or ""
        key = raw if "\ufffd" in text else normaliser.normalize_str(text) or text
        ids.append(keys.setdefault(key, len(keys)))
    if len(keys) != config.engram_compressed_vocab_size:
        raise ValueError(
            f"{tokenizer_file} gives {len(keys)} Engram keys, but engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: the checkpoint and its tokenizer do not belong together"
        )
    return torch.tensor(ids, dtype=torch.int64)
