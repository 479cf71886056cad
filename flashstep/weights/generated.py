"""Random weights made where they are needed, one parameter when it is asked for: ranks of any size load in seconds.

Takes a configuration (of a rank: its view and its layout), a seed and a device; gives a mapping by our name that keeps nothing,
so that a weight's stored form is gone when its prepared one is there. Bytes are drawn as they are stored: FP4 codes uniformly,
E4M3 without NaN, E8M0 scales over ``BINADES`` + 1 powers of two around the one that keeps products of order one. Engram tables
have the sizes that the configuration says; ``engram.hash.smaller_tables`` makes one whose tables fit.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flashstep.config.model import MX_GROUP, WEIGHT_BLOCK, ModelConfig
from flashstep.parallel.layout import WHOLE, Layout
from flashstep.quant.tensor import FP8_BLOCK, MXFP4, QuantTensor
from flashstep.weights.dummy import E8M0_BIAS, FP4_STD, float_values
from flashstep.weights.load import EngramPlanes, Progress
from flashstep.weights.names import Kind, Parameter, engram_table_name, parameters

BINADES = 6  # between the smallest and the largest scale: what 128-wide sums in E4M3 hold exactly
E4M3_STD = 0.6  # of bytes drawn without their highest exponent bit, which only large numbers and NaN have
E4M3_MASK = 0xBF
PIECE = 1 << 24  # fp32 numbers that are drawn at once
SCALE_RMS = math.sqrt(sum(4.0**i for i in range(-(BINADES // 2), BINADES // 2 + 1)) / (BINADES + 1))


class GeneratedWeights(Mapping[str, Tensor | QuantTensor]):
    """Parameters by our name, Engram tables left out; ``progress`` hears of each that is asked for."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        seed: int = 0,
        layout: Layout = WHOLE,
        drafts: bool = False,
        progress: Progress | None = None,
    ) -> None:
        known = parameters(config, layout)
        self._tables = {layer: known[engram_table_name(layer)] for layer in config.engram_layer_ids}
        self._parameters = {
            name: parameter
            for name, parameter in known.items()
            if parameter.kind is not Kind.ENGRAM_TABLE and (drafts or not parameter.is_draft)
        }
        self._device = device
        self._seed = seed
        self._progress = progress
        self._asked = 0

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        parameter = self._parameters[name]
        self._asked += 1
        if self._progress is not None:
            self._progress(self._asked, len(self._parameters))
        generator = self._generator(name)
        if parameter.kind is Kind.FP4_EXPERTS:
            return self._experts(parameter, generator)
        if parameter.kind is Kind.FP8_BLOCK:
            return self._linear(parameter, generator)
        return self._plain(parameter, generator)

    def _plain(self, parameter: Parameter, generator: torch.Generator) -> Tensor:
        """Drawn in fp32, some rows at a time."""
        (stored,) = parameter.stored
        dtype = torch.bfloat16 if parameter.kind is Kind.BF16 else torch.float32
        values = torch.empty(stored.shape, dtype=dtype, device=self._device)
        for piece in values.split(max(PIECE // math.prod(stored.shape[1:]), 1)):
            piece.copy_(float_values(replace(stored, shape=tuple(piece.shape)), generator))
        return values

    def engram(self, layer: int) -> EngramPlanes:
        """The table of ``layer``, whose rows have values of order one."""
        generator = self._generator(engram_table_name(layer))
        rows, width = self._tables[layer].shape
        return EngramPlanes(
            values_RD=_e4m3((rows, width), generator),
            scales_RG=_scales((rows, width // MX_GROUP), 1 / E4M3_STD, generator).view(torch.float8_e8m0fnu),
        )

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def _experts(self, parameter: Parameter, generator: torch.Generator) -> QuantTensor:
        experts, out, inner = parameter.shape
        return QuantTensor(
            data=_bytes((experts, out, inner // 2), generator),
            scale=_scales((experts, out, inner // MX_GROUP), inner**-0.5 / FP4_STD, generator),
            format=MXFP4,
            shape=parameter.shape,
        )

    def _linear(self, parameter: Parameter, generator: torch.Generator) -> QuantTensor:
        out, inner = parameter.shape
        blocks = (-(-out // WEIGHT_BLOCK), -(-inner // WEIGHT_BLOCK))
        return QuantTensor(
            data=_e4m3(parameter.shape, generator),
            scale=_scales(blocks, inner**-0.5 / E4M3_STD, generator),
            format=FP8_BLOCK,
            shape=parameter.shape,
        )


def _bytes(shape: tuple[int, ...], generator: torch.Generator, *, mask: int = 0xFF) -> Tensor:
    """uint8 ``shape``, uniform, and-ed with ``mask``; drawn eight at a time."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(1 << 63), None, generator=generator)
    if mask != 0xFF:
        words &= int.from_bytes(bytes([mask] * 8), "little", signed=True)
    return words.view(torch.uint8)[:count].view(shape)


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _bytes(shape, generator, mask=E4M3_MASK).view(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], level: float, generator: torch.Generator) -> Tensor:
    """uint8 E8M0 bytes whose root mean square is about ``level``."""
    middle = round(math.log2(level / SCALE_RMS)) + E8M0_BIAS
    drawn = torch.empty(shape, dtype=torch.uint8, device=generator.device)
    return drawn.random_(middle - BINADES // 2, middle + BINADES // 2 + 1, generator=generator)
