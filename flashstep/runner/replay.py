"""Bounded replay: which rows the layers past the last KV source run on (spec/model.md 9).

Those layers write nothing but their windows, so of a prompt only the last ``window`` rows can matter to later tokens. They are
counted in absolute positions, from the end of what was known at admission: neither chunks nor neighbours change the result.
Knows no tensors of the model; which policy is in force is the caller's affair.
"""

from flashstep.config.model import ModelConfig
from flashstep.runner.histories import History
from flashstep.step import Span


def may_trim(config: ModelConfig) -> bool:
    """Whether rows may be left out at all: a KV source exists, and no Engram layer lies past the last one."""
    source = config.last_kv_source
    return source is not None and not any(layer > source for layer in config.engram_layer_ids)


def tail_start(history: History, *, known: int, window: int) -> int:
    """First position that goes through every layer, of a request admitted with ``known`` tokens.

    0 where the logits of the whole prompt are asked for.
    """
    return 0 if history.request.params.prompt_logprobs is not None else max(known - window, 0)


def dropped_count(span: Span, start: int) -> int:
    """How many leading rows of ``span`` stop at the last KV source."""
    return min(max(start - span.start, 0), span.length)


def cuts(span: Span, start: int, *, window: int) -> bool:
    """Whether ``start`` is of any consequence to ``span``: rows are dropped, or a row's window reaches back before it."""
    return span.start - (window - 1) < start
