"""Bounded replay: which rows the layers past the last KV source run on (spec/model.md 9).

Those layers write nothing but their windows, so of a prompt's chunk only the last ``window`` rows can matter to later tokens.
Takes spans, gives row numbers. Knows no tensors of the model; which policy is in force is the caller's affair.
"""

from collections.abc import Sequence

import numpy as np

from flashstep.config.model import ModelConfig
from flashstep.step import Span


def may_trim(config: ModelConfig) -> bool:
    """Whether rows may be left out at all: a KV source exists, and no Engram layer lies past the last one."""
    source = config.last_kv_source
    return source is not None and not any(layer > source for layer in config.engram_layer_ids)


def kept_count(span: Span, *, window: int) -> int:
    """How many last rows of ``span`` go through every layer; all of them where each row's logits are asked for."""
    return span.length if span.prompt_logprobs else min(span.length, window)


def kept_rows(spans: Sequence[Span], *, window: int) -> np.ndarray | None:
    """int64 row numbers of the step (spans concatenated) that are kept, ascending; None if that is all of them."""
    if all(kept_count(span, window=window) == span.length for span in spans):
        return None
    kept, end = [], 0
    for span in spans:
        end += span.length
        kept.append(np.arange(end - kept_count(span, window=window), end))
    return np.concatenate(kept)
