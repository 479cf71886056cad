"""Writes a checkpoint in the released layout: config.json, numbered shards, and their index.

Takes the tensors by stored name, in the stored dtypes; refuses names, shapes or dtypes that are not the configuration's, so that
whatever was written can be loaded. Knows no training and no quantiser.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.weights.names import BF16, E8M0, F32, FP8, PACKED_FP4, Stored, stored_tensors
from flashstep.weights.reader import INDEX, CheckpointError

SHARD_BYTES = 4 << 30
TORCH_DTYPES = {
    BF16: torch.bfloat16,
    F32: torch.float32,
    FP8: torch.float8_e4m3fn,
    E8M0: torch.float8_e8m0fnu,
    PACKED_FP4: torch.int8,
}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write ``tensors`` (stored name -> tensor) and ``config`` (the nested ``config.json``) into ``folder``.

    Dtypes: see ``TORCH_DTYPES``; uint8 is taken for the bytes of scales and packed FP4. Shards follow the layers, none is over
    ``shard_bytes`` unless one tensor is. Raises ``CheckpointError`` with all that does not fit.
    """
    wanted = stored_tensors(ModelConfig.parse(config))
    problems = [
        f"{name} is not a tensor of this configuration" for name in sorted(tensors.keys() - wanted.keys())
    ]
    problems += [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    present = [stored for stored in wanted.values() if stored.name in tensors]
    problems += [problem for stored in present if (problem := _misfit(stored, tensors[stored.name]))]
    if problems:
        raise CheckpointError(str(folder), problems)
    write_shards(folder, config, stored=present, fetch=tensors.__getitem__, shard_bytes=shard_bytes)


def write_shards(
    folder: Path,
    config: Mapping[str, Any],
    *,
    stored: Iterable[Stored],
    fetch: Callable[[str], Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tensors of ``stored``, fetched one shard at a time, so that a model larger than memory can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Stored]] = [[]]
    room = shard_bytes
    for item in stored:
        size = _stored_bytes(item)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(item)
        room -= size
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {item.name: _as_stored(item, fetch(item.name)) for item in shard},
            folder / file,
            metadata={"format": "pt"},
        )
        (folder / file).chmod(0o644)  # safetensors leaves it to its owner alone; a checkpoint is shared
        places.update({item.name: file for item in shard})
    total = sum(_stored_bytes(item) for shard in shards for item in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _misfit(stored: Stored, tensor: Tensor) -> str | None:
    if tuple(tensor.shape) != stored.shape:
        return f"{stored.name} has shape {list(tensor.shape)}; expected {list(stored.shape)}"
    allowed = {TORCH_DTYPES[stored.dtype]} | ({torch.uint8} if stored.dtype in (E8M0, PACKED_FP4) else set())
    if tensor.dtype not in allowed:
        return f"{stored.name} has dtype {tensor.dtype}; expected {TORCH_DTYPES[stored.dtype]}"
    return None


def _as_stored(stored: Stored, tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(TORCH_DTYPES[stored.dtype])


def _stored_bytes(stored: Stored) -> int:
    count = 1
    for dim in stored.shape:
        count *= dim
    return count * TORCH_DTYPES[stored.dtype].itemsize
