"""Device code, one folder per family: a front door of typed ops, a plain torch reference, and faster rows where they exist.

``choose_ops`` picks one implementation an op, once, when a model is built; ``python -m flashstep.kernels`` prints the table.
Kernels know shapes and bytes; they know no configuration, request or layer.
"""

from dataclasses import dataclass

import torch

from flashstep.kernels.attention import Attention
from flashstep.kernels.cast import Cast
from flashstep.kernels.decode import Decode
from flashstep.kernels.device import device_facts
from flashstep.kernels.engram import Engram
from flashstep.kernels.fused import Fused
from flashstep.kernels.gemm import Gemm
from flashstep.kernels.indexer import Indexer
from flashstep.kernels.mhc import Mhc
from flashstep.kernels.moe import Moe
from flashstep.kernels.norm_rope import NormRope
from flashstep.kernels.registry import AUTO, Choice, Implementation, Switch, choose
from flashstep.kernels.sampling import Sampling

TABLE: tuple[Implementation, ...] = (
    *Gemm.TABLE,
    *NormRope.TABLE,
    *Cast.TABLE,
    *Mhc.TABLE,
    *Indexer.TABLE,
    *Attention.TABLE,
    *Moe.TABLE,
    *Engram.TABLE,
    *Fused.TABLE,
    *Sampling.TABLE,
    *Decode.TABLE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """Every family, each with its chosen implementations: what a model is built with."""

    gemm: Gemm
    norm_rope: NormRope
    cast: Cast
    mhc: Mhc
    indexer: Indexer
    attention: Attention
    moe: Moe
    engram: Engram
    fused: Fused
    sampling: Sampling
    decode: Decode


def choices(device: torch.device, *, kernels: str = AUTO, batch_invariant: bool = False) -> dict[str, Choice]:
    """The chosen row of each op on ``device``; ``kernels`` is "auto", "reference" or "reference:family.op,...".

    ``batch_invariant`` leaves out the rows whose results may depend on how many rows stand side by side.
    """
    switch = Switch.parse(kernels, known={row.op for row in TABLE})
    facts = device_facts(device, batch_invariant=batch_invariant)
    return choose(TABLE, facts=facts, switch=switch)


def choose_ops(device: torch.device, *, kernels: str = AUTO, batch_invariant: bool = False) -> Ops:
    """Load the chosen implementations, see ``choices``. ValueError if ``kernels`` is not understood."""
    chosen = choices(device, kernels=kernels, batch_invariant=batch_invariant)
    loaded = {op: choice.load() for op, choice in chosen.items()}
    return Ops(
        gemm=Gemm(loaded),
        norm_rope=NormRope(loaded),
        cast=Cast(loaded),
        mhc=Mhc(loaded),
        indexer=Indexer(loaded),
        attention=Attention(loaded),
        moe=Moe(loaded),
        engram=Engram(loaded),
        fused=Fused(loaded),
        sampling=Sampling(loaded),
        decode=Decode(loaded),
    )
