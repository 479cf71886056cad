"""What the tests of acceptance share: toy chains whose laws are known exactly, and chi-square.

A chain is a table: the probabilities of the next token for every history of up to some length, coded in base V with a leading 1.
"""

import itertools
import math

import torch
from torch import Tensor

from flashstep.speculate.verify import accept_block, accept_standard, block_log_scales

# case A09: one target, one draft, eight tokens
TARGET = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02], dtype=torch.float64)
DRAFT = torch.tensor([0.05, 0.10, 0.30, 0.25, 0.10, 0.10, 0.05, 0.05], dtype=torch.float64)


def chi_square(counts: Tensor, law: Tensor) -> tuple[float, float]:
    """Of counts against probabilities: the statistic, and the value that right counts exceed once in 10,000 times.

    What the law forbids must not have come: that gives infinity. Wilson and Hilferty's approximation of the quantile.
    """
    possible = law > 0
    expected = law[possible].double() * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    degrees = max(int(possible.sum()) - 1, 1)
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    return (math.inf if counts[~possible].sum() > 0 else statistic), limit


class Chain:
    """Next-token probabilities by history: ``row(history)``."""

    def __init__(
        self, vocabulary: int, length: int, *, seed: int, zeros: float = 0.0, spread: float = 1.0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        histories = 2 * vocabulary**length
        logits = spread * torch.randn(histories, vocabulary, generator=generator, dtype=torch.float64)
        keep = torch.rand(histories, vocabulary, generator=generator) >= zeros
        keep[~keep.any(dim=1), 0] = True
        self.vocabulary = vocabulary
        self.table = torch.softmax(logits.masked_fill(~keep, -math.inf), dim=1)

    def code(self, tokens_NL: Tensor) -> Tensor:
        """int64 [N, L] histories -> their rows in the table."""
        code = torch.ones(tokens_NL.shape[0], dtype=torch.int64)
        for token_N in tokens_NL.unbind(dim=1):
            code = code * self.vocabulary + token_N
        return code

    def rows(self, tokens_NL: Tensor) -> Tensor:
        return self.table[self.code(tokens_NL)]

    def law(self, length: int) -> Tensor:
        """Probabilities of all sequences of ``length`` tokens, in the order of ``sequences``."""
        every = sequences(self.vocabulary, length)
        law = torch.ones(every.shape[0], dtype=torch.float64)
        for place in range(length):
            law *= self.rows(every[:, :place]).gather(1, every[:, place : place + 1])[:, 0]
        return law

    def continued(self, tokens_NL: Tensor, length_N: Tensor, *, generator: torch.Generator) -> Tensor:
        """Histories of which only the first ``length_N`` tokens are meant; the others are drawn anew from this chain."""
        tokens_NL = tokens_NL.clone()
        for place in range(tokens_NL.shape[1]):
            drawn = torch.multinomial(self.rows(tokens_NL[:, :place]), 1, generator=generator)[:, 0]
            tokens_NL[:, place] = torch.where(length_N > place, tokens_NL[:, place], drawn)
        return tokens_NL


def sequences(vocabulary: int, length: int) -> Tensor:
    """int64 [V ** length, length], the last token fastest."""
    every = list(itertools.product(range(vocabulary), repeat=length))
    return torch.tensor(every, dtype=torch.int64).reshape(len(every), length)


def scales(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor, *, block: bool) -> Tensor:
    """The log P that ``residual`` asks for."""
    return (
        block_log_scales(drafts_RK, log_p_RTV, log_q_RKV) if block else torch.zeros_like(log_p_RTV[:, :, 0])
    )


def accept(rule: str, drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor, uniforms_RK: Tensor) -> Tensor:
    return {"standard": accept_standard, "block": accept_block}[rule](
        drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK
    )
