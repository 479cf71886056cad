"""GPU forms of two of the oracle's hot functions: Sinkhorn on scalars and attention by FlexAttention.

Each has the oracle's meaning (tests compare them on the CPU) and exists because the plain form is bound by launches or by
memory on a card. They are plain torch; ``train.tiny`` compiles them. Suffixes: B rows, T tokens, E entries, H heads,
C channels, S streams.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

STREAMS = 4
BLOCK = 128  # FlexAttention tile


def sinkhorn_start(m: Tensor, eps: float) -> Tensor:
    """Softmax over columns, then the first column normalisation: fp32 [..., 16] -> [..., 16] (row = input stream)."""
    n = STREAMS
    v = list(m.unbind(-1))
    k: list[Tensor] = []
    for i in range(n):
        row = v[n * i : n * i + n]
        top = torch.maximum(torch.maximum(row[0], row[1]), torch.maximum(row[2], row[3]))
        exps = [torch.exp(e - top) for e in row]
        total = exps[0] + exps[1] + exps[2] + exps[3]
        k += [e / total + eps for e in exps]
    return torch.stack(_columns(k, eps), -1)


def sinkhorn_pair(k: Tensor, eps: float) -> Tensor:
    """One row and one column normalisation of [..., 16]."""
    n = STREAMS
    v = list(k.unbind(-1))
    for i in range(n):
        total = v[n * i] + v[n * i + 1] + v[n * i + 2] + v[n * i + 3] + eps
        v[n * i : n * i + n] = [e / total for e in v[n * i : n * i + n]]
    return torch.stack(_columns(v, eps), -1)


def _columns(k: list[Tensor], eps: float) -> list[Tensor]:
    n = STREAMS
    totals = [k[j] + k[n + j] + k[2 * n + j] + k[3 * n + j] + eps for j in range(n)]
    return [k[n * i + j] / totals[j] for i in range(n) for j in range(n)]


def sinkhorn_project(k: Tensor, grad: Tensor, alpha: Tensor) -> Tensor:
    """One alternation of the backward's projection: row corrections [..., 4] after new column corrections."""
    n = STREAMS
    ks, gs, al = list(k.unbind(-1)), list(grad.unbind(-1)), list(alpha.unbind(-1))
    beta = _column_corrections(ks, gs, al)
    out = []
    for i in range(n):
        top = sum(
            (ks[n * i + j] * (gs[n * i + j] - beta[j]) for j in range(1, n)),
            ks[n * i] * (gs[n * i] - beta[0]),
        )
        out.append(top / (ks[n * i] + ks[n * i + 1] + ks[n * i + 2] + ks[n * i + 3]))
    return torch.stack(out, -1)


def sinkhorn_finish(k: Tensor, grad: Tensor, alpha: Tensor) -> Tensor:
    """dM = K (G - alpha_row - beta_column): every row and column of dM sums to 0."""
    n = STREAMS
    ks, gs, al = list(k.unbind(-1)), list(grad.unbind(-1)), list(alpha.unbind(-1))
    beta = _column_corrections(ks, gs, al)
    return torch.stack(
        [ks[n * i + j] * (gs[n * i + j] - al[i] - beta[j]) for i in range(n) for j in range(n)], -1
    )


def _column_corrections(ks: list[Tensor], gs: list[Tensor], al: list[Tensor]) -> list[Tensor]:
    n = STREAMS
    out = []
    for j in range(n):
        top = sum((ks[n * i + j] * (gs[n * i + j] - al[i]) for i in range(1, n)), ks[j] * (gs[j] - al[0]))
        out.append(top / (ks[j] + ks[n + j] + ks[2 * n + j] + ks[3 * n + j]))
    return out


class Sinkhorn(torch.autograd.Function):
    """fp32 [..., 4, 4] -> doubly stochastic (spec/model.md 2, step 5), with the gradient of the fixed point.

    No history of the iterations is kept. The four pieces are class attributes so that the trainer can compile them.
    """

    start: Callable[..., Tensor] = staticmethod(sinkhorn_start)
    pair: Callable[..., Tensor] = staticmethod(sinkhorn_pair)
    project: Callable[..., Tensor] = staticmethod(sinkhorn_project)
    finish: Callable[..., Tensor] = staticmethod(sinkhorn_finish)

    @staticmethod
    def forward(ctx: Any, m: Tensor, iterations: int, eps: float) -> Tensor:
        k = Sinkhorn.start(m.reshape(-1, STREAMS * STREAMS), eps)
        for _ in range(iterations - 1):
            k = Sinkhorn.pair(k, eps)
        ctx.save_for_backward(k)
        ctx.iterations = iterations
        return k.view(m.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (k,) = ctx.saved_tensors
        grad = grads[0].reshape(k.shape)
        alpha = k.new_zeros(k.shape[0], STREAMS)
        for _ in range(ctx.iterations):
            alpha = Sinkhorn.project(k, grad, alpha)
        return Sinkhorn.finish(k, grad, alpha).view(grads[0].shape), None, None


def block_lists(tokens: int, entries: int, ratio: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(count [1,1,Q], index [1,1,Q,K]) of the key tiles that a query tile can see: two window tiles, then entries."""
    queries, window_tiles, entry_tiles = tokens // BLOCK, tokens // BLOCK, entries // BLOCK
    count = torch.zeros(1, 1, queries, dtype=torch.int32)
    index = torch.zeros(1, 1, queries, window_tiles + entry_tiles, dtype=torch.int32)
    for q in range(queries):
        seen = [t for t in (q - 1, q) if t >= 0]
        if entries:
            last = min(entry_tiles, q // ratio + 1)
            seen += [window_tiles + t for t in range(last)]
        count[0, 0, q] = len(seen)
        index[0, 0, q, : len(seen)] = torch.tensor(seen)
        rest = sorted(set(range(window_tiles + entry_tiles)) - set(seen))
        index[0, 0, q, len(seen) :] = torch.tensor(rest)
    return count.to(device), index.to(device)


class TileLists(NamedTuple):
    """Which tiles meet, seen from queries (``kv_*``) and from keys (``q_*``): int32 [1, 1, ...]. Static for a shape."""

    kv_count: Tensor
    kv_index: Tensor
    q_count: Tensor
    q_index: Tensor


def tile_lists(tokens: int, entries: int, ratio: int, device: torch.device) -> TileLists:
    """The tiles of ``block_lists``, both ways round."""
    count, index = block_lists(tokens, entries, ratio, torch.device("cpu"))
    mask = BlockMask.from_kv_blocks(
        count, index, None, None, BLOCK_SIZE=BLOCK, seq_lengths=(tokens, tokens + entries)
    )
    assert mask.q_num_blocks is not None and mask.q_indices is not None
    return TileLists(*(t.to(device) for t in (count, index, mask.q_num_blocks, mask.q_indices)))


def flex_union(
    q: Tensor,
    keys: Tensor,
    sink: Tensor,
    documents: Tensor,
    selected: Tensor | None,
    lists: TileLists,
    *,
    ratio: int,
    window: int,
) -> Tensor:
    """One softmax over window and entries, with sink: what ``oracle.model.attend`` computes, by FlexAttention.

    q [B, T, H, C], keys [B, T + E, C] (key = value; E = T / ratio, none if ratio is 0), sink [H] fp32, documents [B, T].
    ``selected`` bool [B, T, E], or None: every visible entry.
    """
    tokens = q.shape[1]
    step = max(ratio, 1)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = torch.where(j < tokens, j, (j - tokens) * step)
        same = documents[b, i] == documents[b, row]
        near = (j < tokens) & (j <= i) & (i - j < window)
        if ratio == 0:
            return same & near
        if selected is None:
            return same & (near | ((j >= tokens) & (row + step - 1 <= i)))
        entry = torch.where(j < tokens, 0, j - tokens)
        return same & (near | ((j >= tokens) & selected[b, i, entry]))

    mask = BlockMask(
        seq_lengths=(tokens, keys.shape[1]),
        kv_num_blocks=lists.kv_count,
        kv_indices=lists.kv_index,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=lists.q_count,
        q_indices=lists.q_index,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )
    shared = keys.unsqueeze(1)
    out, aux = flex_attention(
        q.transpose(1, 2), shared, shared, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    weight = torch.sigmoid(aux.lse - sink[None, :, None])  # ty: ignore[unsupported-operator]
    return (out.float() * weight.unsqueeze(-1)).to(q.dtype).transpose(1, 2)
