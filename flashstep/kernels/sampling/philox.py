"""Philox4x32-10 (Salmon et al., SC 2011): random numbers as a pure function of a key and a counter.

Owns which counter stands for which draw, so that a number depends on (seed, output position, purpose, offset, token id) and on
nothing else in the batch. Words are unsigned 32-bit values held in int64 tensors. Suffixes: R rows, V vocabulary, Q groups of
four.
"""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key words grow by between rounds
ROUNDS = 10
LANES = 4  # numbers a counter gives


class Purpose(enum.IntEnum):
    """What a draw is for; purposes never share numbers.

    TOKEN: the token at an output position. DRAFT and ACCEPT: the drafts proposed behind the token at an output position, and
    whether they stand. Several steps may draft for one position, each behind another newest token, so these two are keyed by the
    newest token's position and the draft's offset behind it.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 counter words and two key words (broadcastable) -> four int64 words, each in 0 .. 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # products wrap modulo 2^64 in int64, which leaves both halves right
        low_product, high_product = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high_product >> 32 & WORD) ^ c1 ^ k0,
            high_product & WORD,
            (low_product >> 32 & WORD) ^ c3 ^ k1,
            low_product & WORD,
        )
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


def uniforms(
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    count: int,
    purpose: Purpose = Purpose.TOKEN,
    offsets_R: Tensor | None = None,
) -> Tensor:
    """int64 seeds and output positions [R] -> fp64 [R, count] in the open interval (0, 1), number v from counter v // 4.

    ``offsets_R`` int64 [R] is the last counter word, 0 where none is given.
    """
    quads_Q = torch.arange(-(-count // LANES), device=seeds_R.device)
    words = philox4x32(
        (
            quads_Q.unsqueeze(0),
            (positions_R & WORD).unsqueeze(1),
            torch.full((1, 1), int(purpose), device=seeds_R.device),  # filled there: no copy from the host
            (torch.zeros_like(positions_R) if offsets_R is None else offsets_R & WORD).unsqueeze(1),
        ),
        ((seeds_R & WORD).unsqueeze(1), (seeds_R >> 32 & WORD).unsqueeze(1)),
    )
    return (torch.stack(words, dim=2).flatten(1)[:, :count].double() + 0.5) * 2.0**-32


def gumbel(
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    count: int,
    purpose: Purpose = Purpose.TOKEN,
    offsets_R: Tensor | None = None,
) -> Tensor:
    """Standard Gumbel noise, fp64 [R, count]: one number a token id. Keyed as ``uniforms``."""
    uniforms_RV = uniforms(seeds_R, positions_R, count=count, purpose=purpose, offsets_R=offsets_R)
    return -torch.log(-torch.log(uniforms_RV))
