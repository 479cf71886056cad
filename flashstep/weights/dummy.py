"""Random weights of any configuration, in the stored form: what ``--load-format dummy`` serves, and dummy checkpoints on disk.

Each tensor depends on the seed and its own name only. Scales follow spec/model.md 13, so that no branch is degenerate: sinks,
biases and coefficients are alive, and neighbouring quantisation scales differ, so that a misplaced one shows.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.weights.names import BF16, E8M0, FP8, PACKED_FP4, Stored, stored_tensors
from flashstep.weights.write import SHARD_BYTES, write_shards

E8M0_BIAS = 127
FP8_STD = 16.0  # of the unscaled E4M3 values: far from 448 and from the subnormals
FP4_STD = 2.93  # of uniformly drawn E2M1 codes
SCALE_RMS = 1.32  # of 1/2, 1 and 2: a block's scale is drawn among three neighbours
LOGIT_STD = 2.0


class DummyWeights:
    """Random tensors by stored name."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.stored = stored_tensors(config)
        self._seed = seed

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` in its stored dtype and shape, the same whenever it is asked for."""
        stored = self.stored[name]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        if stored.dtype == PACKED_FP4:
            return torch.randint(-128, 128, stored.shape, generator=generator, dtype=torch.int8)
        if stored.dtype == FP8:
            return (torch.randn(stored.shape, generator=generator) * FP8_STD).to(torch.float8_e4m3fn)
        if stored.dtype == E8M0:
            return self._scales(stored, generator)
        values = float_values(stored, generator)
        return values.to(torch.bfloat16) if stored.dtype == BF16 else values

    def _scales(self, stored: Stored, generator: torch.Generator) -> Tensor:
        """Powers of two around the one that gives the weight a standard deviation of in^-0.5 (Engram rows: about 1)."""
        values = self.stored[f"{stored.name.removesuffix('.scale')}.weight"]
        packed = values.dtype == PACKED_FP4
        fan_in = 1 if ".engram.embed." in values.name else values.shape[1] * (2 if packed else 1)
        middle = round(math.log2(fan_in**-0.5 / (SCALE_RMS * (FP4_STD if packed else FP8_STD))))
        offsets = torch.randint(-1, 2, stored.shape, generator=generator)
        return (offsets + middle + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def write_dummy(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint of random weights for the nested ``config``; the tokenizer's files are the caller's."""
    dummy = DummyWeights(ModelConfig.parse(config), seed)
    write_shards(folder, config, stored=dummy.stored.values(), fetch=dummy.tensor, shard_bytes=shard_bytes)


def float_values(stored: Stored, generator: torch.Generator) -> Tensor:
    """fp32 on the generator's device, spread as spec/model.md 13 asks for this kind of tensor."""
    for ending, spread in SPREADS:
        if stored.name.endswith(ending):
            noise = torch.randn(stored.shape, generator=generator, device=generator.device)
            return spread(noise, stored)
    raise AssertionError(f"no spread is known for {stored.name}")


def _normal(std: float) -> Callable[[Tensor, Stored], Tensor]:
    return lambda noise, _: noise * std


def _around_one(noise: Tensor, _: Stored) -> Tensor:
    return 1 + 0.1 * noise


def _fan_in(noise: Tensor, stored: Stored) -> Tensor:
    return noise * stored.shape[-1] ** -0.5


SPREADS: tuple[tuple[str, Callable[[Tensor, Stored], Tensor]], ...] = (  # the first that fits
    ("norm.weight", _around_one),
    ("attn_sink", _normal(0.5)),
    ("gate.bias", _normal(0.1)),
    ("gate.bias_vl", _normal(0.1)),
    ("_base", _normal(0.5)),
    ("_scale", lambda noise, _: 0.5 + torch.special.ndtr(noise)),  # uniform in [0.5, 1.5]
    ("_fn", _fan_in),
    ("engram.q_weight", _around_one),
    ("engram.k_weight", _around_one),
    ("embed.weight", _normal(1.0)),  # also the drafter's Markov embedding
    ("markov_head.head.weight", _fan_in),
    ("head.weight", lambda noise, stored: LOGIT_STD * _fan_in(noise, stored)),
    (".weight", _fan_in),
)
