"""Log-probabilities of tokens: the log-softmax of the RAW logits, before bias, penalties, temperature and truncation.

This is what vLLM calls raw_logprobs, its default: they speak of the model, not of the request's sampling parameters, and are
finite for every token. Ranks start at 1; equal logits rank by token id. Suffixes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstep.step import TokenLogprob


def token_logprobs(logits_RV: Tensor, tokens: Sequence[int], *, counts: Sequence[int]) -> list[TokenLogprob]:
    """fp32 logits [R, V], one token and one number of alternatives a row -> one ``TokenLogprob`` a row.

    Sums run in fp64 and are rounded once, so that a row does not depend on the rows beside it.
    """
    if not tokens:
        return []
    log_totals_R = torch.logsumexp(logits_RV.double(), dim=1)
    chosen_R1 = torch.tensor(tokens, device=logits_RV.device).unsqueeze(1)
    keys_RV = _order_keys(logits_RV)
    ranks = (keys_RV > keys_RV.gather(1, chosen_R1)).sum(dim=1) + 1
    chosen = _logprobs(logits_RV, log_totals_R, chosen_R1)[:, 0].tolist()
    most = min(max(counts), logits_RV.shape[1])
    top_RN = keys_RV.topk(most, dim=1).indices if most else chosen_R1[:, :0]
    top = _logprobs(logits_RV, log_totals_R, top_RN).tolist()
    return [
        TokenLogprob(
            token=token,
            logprob=logprob,
            rank=rank,
            top=tuple(
                (other, value, place)
                for place, (other, value) in enumerate(zip(ids[:n], row, strict=False), start=1)
            ),
        )
        for token, logprob, rank, ids, row, n in zip(
            tokens, chosen, ranks.tolist(), top_RN.tolist(), top, counts, strict=True
        )
    ]


def _logprobs(logits_RV: Tensor, log_totals_R: Tensor, ids_RN: Tensor) -> Tensor:
    """fp32 [R, N]."""
    return (logits_RV.gather(1, ids_RN).double() - log_totals_R.unsqueeze(1)).float()


def _order_keys(logits_RV: Tensor) -> Tensor:
    """int64 [R, V], all different within a row: larger logits first, then smaller ids."""
    bits = (logits_RV.float() + 0.0).view(torch.int32)  # + 0.0 makes the two zeros equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers these sort like the floats
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return ordered.long() * 2**32 - ids_V
