"""StepPlan -> ForwardBatch: the rows of all spans, concatenated, with everything a forward reads.

Takes resolved spans, slots that are already up to date, and the Engram token map; gives tensors. Knows no policy and no sampling.
Suffixes: T rows, R requests (one a span), B table columns, N look-back columns.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashstep.model.batch import ForwardBatch
from flashstep.runner.histories import History, Slots
from flashstep.runner.replay import cuts, dropped_count, tail_start
from flashstep.runner.resolve import Resolved
from flashstep.runner.staging import to_device
from flashstep.step import Span


class BatchBuilder:
    """Builds the batch of a step.

    ``token_map`` int64 [vocabulary] holds compressed ids; ``pad`` is the compressed PAD; ``lookback`` is N;
    ``trim_window`` is how many last tokens of a prompt run past the last KV source, or None where every row runs everywhere.
    """

    def __init__(
        self, *, token_map: np.ndarray, pad: int, lookback: int, trim_window: int | None, device: torch.device
    ) -> None:
        self.token_map = token_map
        self.pad = pad
        self.lookback = lookback
        self.trim_window = trim_window
        self.device = device

    def build(self, resolved: Sequence[Resolved], slots: Slots) -> ForwardBatch:
        """One row a token of ``resolved``, whose slots have been extended."""
        spans = [item.span for item in resolved]
        tokens, lookbacks = zip(*map(self._tokens, resolved), strict=True)
        lengths = [span.length for span in spans]
        slot_R = np.array([span.slot for span in spans], dtype=np.int64)
        columns = max(-(-(span.start + span.length) // slots.block_size) for span in spans)
        starts = [self._tail_start(item.span, item.history, slots) for item in resolved]
        logit_rows = _logit_rows(resolved, starts)
        return ForwardBatch(
            input_ids_T=self._tensor(np.concatenate(tokens)),
            positions_T=self._tensor(np.concatenate([np.arange(s.start, s.start + s.length) for s in spans])),
            request_T=self._tensor(np.repeat(np.arange(len(spans)), lengths)),
            slot_R=self._tensor(slot_R),
            block_table_RB=self._tensor(slots.blocks[slot_R, :columns]),
            window_table_RB=self._tensor(slots.window_blocks[slot_R, :columns]),
            window_start_R=self._tensor(slots.window_start[slot_R]),
            store_T=self._tensor(np.concatenate([np.arange(s.length) >= s.replay for s in spans])),
            lookback_TN=self._tensor(np.concatenate(lookbacks)),
            logit_rows=self._tensor(logit_rows),
            tail_start_R=self._tensor(np.array(starts, dtype=np.int64)) if any(starts) else None,
            tail_rows=self._tail_rows(spans, starts),
        )

    def _tokens(self, item: Resolved) -> tuple[np.ndarray, np.ndarray]:
        """int64 ids [length], and compressed ids [length, N] of each token and those before it, newest first."""
        before = min(item.span.start, self.lookback - 1)
        ids = np.array(item.tokens(item.span.start - before), dtype=np.int64)
        padding = np.full(self.lookback - 1 - before, self.pad, dtype=np.int64)
        compressed = np.concatenate([padding, self.token_map[ids]])
        lookback = np.lib.stride_tricks.sliding_window_view(compressed, self.lookback)[:, ::-1]
        return ids[before:], lookback

    def _tail_start(self, span: Span, history: History, slots: Slots) -> int:
        """Where the layers past the last KV source begin, 0 where that is of no consequence to ``span``."""
        if self.trim_window is None:
            return 0
        start = tail_start(history, known=int(slots.known[span.slot]), window=self.trim_window)
        return start if cuts(span, start, window=self.trim_window) else 0

    def _tail_rows(self, spans: Sequence[Span], starts: Sequence[int]) -> Tensor | None:
        """The rows that run past the last KV source, None if all do."""
        dropped = [dropped_count(span, start) for span, start in zip(spans, starts, strict=True)]
        if not any(dropped):
            return None
        kept = [np.arange(span.length) >= count for span, count in zip(spans, dropped, strict=True)]
        return self._tensor(np.concatenate(kept).nonzero()[0])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


def _logit_rows(resolved: Sequence[Resolved], starts: Sequence[int]) -> np.ndarray:
    """The rows whose logits are wanted, span by span, counted among the rows that run to the end."""
    rows: list[int] = []
    base = 0
    for item, start in zip(resolved, starts, strict=True):
        dropped = dropped_count(item.span, start)
        rows += [base + offset - dropped for offset in wanted_offsets(item)]
        base += item.span.length - dropped
    return np.array(rows, dtype=np.int64)


def prompt_logprob_count(span: Span, history: History) -> int:
    """How many prompt tokens, at positions span.start + 1 and on, the rows of ``span`` say something about."""
    if not span.prompt_logprobs:
        return 0
    return max(min(span.length, len(history.request.prompt) - 1 - span.start), 0)


def wanted_offsets(item: Resolved) -> list[int]:
    """The rows whose logits are wanted: those that predict prompt tokens, then the newest one and its drafts."""
    length = item.span.length
    sampled = range(length - 1 - len(item.drafts), length) if item.span.sample else ()
    return [*range(prompt_logprob_count(item.span, item.history)), *sampled]
