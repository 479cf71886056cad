"""Weights for model tests: the golden checkpoints, and random ones of the tiny configurations of spec/model.md 13."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.engram.table import EngramTable
from flashstep.quant.tensor import FP8_BLOCK, MXFP4, QuantTensor
from flashstep.weights.names import Kind, parameters

CPU = torch.device("cpu")


def assemble(
    config: ModelConfig, fetch: Callable[[str], Tensor], *, drafts: bool = False
) -> tuple[dict, dict]:
    """Weights by our names and Engram tables by layer, from stored tensors by stored name; the draft's if ``drafts``."""
    weights: dict[str, Tensor | QuantTensor] = {}
    tables: dict[int, EngramTable] = {}
    for name, parameter in parameters(config).items():
        if parameter.is_draft and not drafts:
            continue
        tensors = [fetch(stored.name) for stored in parameter.stored]
        if parameter.kind in (Kind.BF16, Kind.F32):
            weights[name] = tensors[0]
        elif parameter.kind is Kind.ENGRAM_TABLE:
            tables[int(name.split(".")[1])] = EngramTable(tensors[0], tensors[1])
        else:
            stacked = parameter.kind is Kind.FP4_EXPERTS
            data = torch.stack(tensors[::2]).view(torch.uint8) if stacked else tensors[0]
            scale = torch.stack(tensors[1::2]) if stacked else tensors[1]
            weights[name] = QuantTensor(
                data=data,
                scale=scale.view(torch.uint8),
                format=MXFP4 if stacked else FP8_BLOCK,
                shape=parameter.shape,
            )
    return weights, tables


def read_checkpoint(folder: Path, *, drafts: bool = False) -> tuple[ModelConfig, dict, dict]:
    """Configuration, weights and tables of a released-layout checkpoint."""
    config = ModelConfig.read(folder)
    shards = [safe_open(str(file), framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    where = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 - not a mapping
    weights, tables = assemble(config, lambda name: where[name].get_tensor(name), drafts=drafts)
    return config, weights, tables
