"""Tokens from logits, on the device: Gumbel-max with keyed noise, its cuts, and the chain of a draft (spec/model.md 8.4, 8.6).

Owns the signatures; ``philox`` owns which number is whose. Of equal ones the lowest token id wins, everywhere. What a row gives
depends on its logits and its own numbers only, worked out in fp64. Rows with penalties or a grammar come adjusted, or go through
``flashstep.sampling.sampler``, which has the same law. Suffixes: T rows, R requests, K places of
a draft block, M Markov rank, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("sample", "least_kept", "chain")
EVERYTHING = -(1 << 63)  # the least key: a row that keeps every token


class Sampling(Family):
    """Public sampling ops."""

    TABLE = (
        *(
            Implementation(
                op=f"sampling.{op}", module="flashstep.kernels.sampling.triton", needs=frozenset({"sm90"})
            )
            for op in ("sample", "chain")
        ),
        Implementation(
            op="sampling.least_kept", module="flashstep.kernels.sampling.sorted", needs=frozenset({"cuda"})
        ),
        *(Implementation(op=f"sampling.{op}", module="flashstep.kernels.sampling.reference") for op in OPS),
    )

    def sample(
        self,
        logits_TV: Tensor,
        *,
        temperature_T: Tensor,
        seed_T: Tensor,
        position_T: Tensor,
        least_T: Tensor | None = None,
    ) -> Tensor:
        """fp32 logits [T, V] -> int64 [T]: the largest at temperature 0, else the largest of (x - max) / temperature + noise.

        Temperatures are fp64, seeds and output positions int64. ``least_T`` int64 leaves out the tokens whose ``order`` is below
        it (``least_kept``); a row at temperature 0 has no use for it.
        """
        assert logits_TV.dtype is torch.float32 and logits_TV.ndim == 2
        assert temperature_T.dtype is torch.float64 and seed_T.dtype is torch.int64
        return self._loaded["sample"](
            logits_TV, temperature_T=temperature_T, seed_T=seed_T, position_T=position_T, least_T=least_T
        )

    def least_kept(
        self,
        logits_TV: Tensor,
        *,
        temperature_T: Tensor,
        top_k_T: Tensor,
        top_p_T: Tensor,
        min_p_T: Tensor,
    ) -> Tensor:
        """fp32 logits [T, V] -> int64 [T]: the ``order`` of the last token that min-p, then top-k, then top-p leave.

        ``top_k_T`` int64, 0 or less: off; ``top_p_T`` fp64, 1: off; ``min_p_T`` fp64, 0: off. ``EVERYTHING`` where nothing is
        cut, and at temperature 0.
        """
        assert logits_TV.dtype is torch.float32 and temperature_T.dtype is torch.float64
        return self._loaded["least_kept"](
            logits_TV, temperature_T=temperature_T, top_k_T=top_k_T, top_p_T=top_p_T, min_p_T=min_p_T
        )

    def chain(
        self, logits_RKV: Tensor, *, anchor_R: Tensor, embedding_VM: Tensor, weight: Any, places: int
    ) -> Tensor:
        """fp32 logits [R, K, V] of a draft block -> int64 [R, places]: each place's best token, given the one before it.

        A place's logits are those of the block and the Markov head's bias, fp32: ``weight`` (``gemm.prepare_bf16`` of [V, M])
        times the bf16 embedding [.., M] of the token before, which is ``anchor_R`` for the first place.
        """
        assert logits_RKV.dtype is torch.float32 and embedding_VM.dtype is torch.bfloat16
        assert 1 <= places <= logits_RKV.shape[1] and anchor_R.shape == logits_RKV.shape[:1]
        return self._loaded["chain"](
            logits_RKV, anchor_R=anchor_R, embedding_VM=embedding_VM, weight=weight, places=places
        )


def order(logits_TV: Tensor) -> Tensor:
    """fp32 [T, V] -> int64 [T, V], all different within a row: larger logits first, then smaller ids."""
    bits = (logits_TV + 0.0).view(torch.int32)  # + 0.0 makes the two zeros equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers these sort like the floats
    ids_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    return ordered.long() * 2**32 - ids_V


def sample_cost(*, rows: int, vocabulary: int) -> Cost:
    """Logits once; a Philox word and two logarithms a token, counted as 100 operations."""
    return Cost(bytes=4 * rows * vocabulary, flops=100 * rows * vocabulary)


def least_kept_cost(*, rows: int, vocabulary: int) -> Cost:
    """Logits once, an exponential a token."""
    return Cost(bytes=4 * rows * vocabulary, flops=50 * rows * vocabulary)


def chain_cost(*, requests: int, places: int, vocabulary: int, rank: int) -> Cost:
    """The head's weight and the logits once a place."""
    return Cost(
        bytes=places * vocabulary * (2 * rank + 4 * requests),
        flops=2 * requests * places * vocabulary * rank,
    )
