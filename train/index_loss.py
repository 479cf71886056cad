"""What trains the indexer: on sampled rows, its scores shall predict where the attention of its users goes.

Target: share of the whole softmax (window and sink included) on each visible entry, summed over heads and over all layers
that will use the selection, and for the candidate source also the Reindex layers behind it. The model is not taught:
indexer inputs are detached (``Options.detach_indexer``) and the target carries no gradient.
Suffixes: B rows of the batch, R sampled rows, J entries, I index heads, K index channels, H heads, C channels, M keys.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from oracle.model import AttentionCall, Trace


def mass(q_BRHC: Tensor, keys_BMC: Tensor, seen_BRM: Tensor, sink_H: Tensor, window_keys: int) -> Tensor:
    """fp32 [B, R, J]: share of the softmax on each entry, summed over heads."""
    b, r, h, c = q_BRHC.shape
    logits = (q_BRHC.reshape(b, r * h, c) @ keys_BMC.mT).float().view(b, r, h, -1) * c**-0.5
    logits = logits.masked_fill(~seen_BRM.unsqueeze(2), -math.inf)
    top = torch.maximum(logits.amax(-1, keepdim=True), sink_H[None, None, :, None])
    exps = torch.exp(logits - top)
    total = exps.sum(-1, keepdim=True) + torch.exp(sink_H[None, None, :, None] - top)
    return (exps / total)[..., window_keys:].sum(2)


def divergence(
    query_BRIK: Tensor, weight_BRI: Tensor, keys_BJK: Tensor, target_BRJ: Tensor, visible_BRJ: Tensor
) -> tuple[Tensor, Tensor]:
    """(KL of the normalised target to softmax of the index scores, weighted by mass; sum of the weights): two scalars."""
    heads, channels = query_BRIK.shape[-2:]
    dots = torch.einsum("brik,bjk->brij", query_BRIK.float(), keys_BJK.float()).relu()
    scores = (dots * weight_BRI.float().unsqueeze(-1)).sum(2) * (channels**-0.5 * heads**-0.5)
    log_p = scores.masked_fill(~visible_BRJ, -1e30).log_softmax(-1).masked_fill(~visible_BRJ, 0)
    weight = target_BRJ.sum(-1)
    target = target_BRJ / (weight.unsqueeze(-1) + 1e-9)
    kl = (target * ((target + 1e-9).log() - log_p)).sum(-1)
    return (kl * weight).sum(), weight.sum()


def users(config: ModelConfig, source: int) -> list[int]:
    """Layers whose entries the list of ``source`` must contain."""
    found = [s.index for s in config.layers if s.index_source == source]
    if source == config.candidate_source_layer_id:
        found += [s.index for s in config.layers if s.index_source is not None and s.index_source > source]
    return found


def gather_rows(x: Tensor, rows_BR: Tensor) -> Tensor:
    """x [B, T, ...] at rows [B, R] -> [B, R, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], rows_BR]


@dataclasses.dataclass
class IndexLoss:
    """The loss over a trace; ``mass`` and ``divergence`` may be compiled twins."""

    config: ModelConfig
    mass: Callable[..., Tensor] = mass
    divergence: Callable[..., tuple[Tensor, Tensor]] = divergence

    def __call__(self, trace: Trace, rows_BR: Tensor) -> Tensor:
        """Mean weighted divergence over the index sources."""
        losses = []
        for source in self.config.index_source_layer_ids:
            call: AttentionCall = trace[f"layers.{source}.attention"]
            seen, visible = self._seen(call, rows_BR)
            with torch.no_grad():
                target = sum(
                    (
                        self._mass(trace[f"layers.{user}.attention"], rows_BR, seen)
                        for user in users(self.config, source)
                    ),
                    torch.zeros((), device=rows_BR.device),
                )
            query = gather_rows(trace[f"layers.{source}.index_query"], rows_BR)
            weight = gather_rows(trace[f"layers.{source}.index_weights"], rows_BR)
            keys = trace[f"layers.{call.layer.kv_source}.index_keys"]
            total, norm = self.divergence(query, weight, keys, target, visible)
            losses.append(total / (norm + 1e-6))
        return torch.stack(losses).mean()

    def _mass(self, call: AttentionCall, rows_BR: Tensor, seen: Tensor) -> Tensor:
        assert call.entries_BJC is not None
        keys = torch.cat((call.window_k_BNC, call.entries_BJC), 1)
        return self.mass(
            gather_rows(call.q_BTHC, rows_BR), keys, seen, call.sink_H, call.window_k_BNC.shape[1]
        )

    def _seen(self, call: AttentionCall, rows_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Masks [B, R, N + J] of everything visible, and [B, R, J] of entries."""
        assert call.entries_BJC is not None
        ratio, documents = call.layer.ratio, call.documents_BR
        own = gather_rows(documents, rows_BR).unsqueeze(-1)
        row = rows_BR.unsqueeze(-1)
        distance = row - call.key_rows_N
        near = (distance >= 0) & (distance < call.window) & (own == documents.unsqueeze(1))
        first = torch.arange(call.entries_BJC.shape[1], device=rows_BR.device) * ratio
        visible = (first + ratio - 1 <= row) & (own == documents[:, first].unsqueeze(1))
        return torch.cat((near, visible), -1), visible
