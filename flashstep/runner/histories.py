"""What the runner remembers between steps: the tokens of each request, and the tables of each slot.

Owns histories by request id (they outlive a preemption) and block tables by slot (they do not), both brought
up to date by the deltas of plans. Knows no tensors; numpy arrays are what a batch is cut from.
"""

from dataclasses import dataclass, field

import numpy as np

from flashstep.request import Request
from flashstep.sampling.constraint import Matcher
from flashstep.speculate.dspark import Proposal
from flashstep.step import Admission, Span

ABSENT = -1


@dataclass(kw_only=True, slots=True)
class History:
    """One request and the tokens it has so far; what it must follow, drafts proposed behind its newest token, if any.

    ``foreseen`` are the survivals of the proposal before, () before the first. ``plain``: if its matcher lets it, its tokens
    depend on logits, temperature and cuts only, and nobody asks for more than tokens. ``cuts``: it has a top-k, top-p or min-p.
    """

    request: Request
    output: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    proposal: Proposal | None = None
    foreseen: tuple[float, ...] = ()

    plain: bool = field(init=False)
    cuts: bool = field(init=False)

    def __post_init__(self) -> None:
        p = self.request.params
        self.plain = (
            p.logprobs is None
            and p.repetition_penalty == 1
            and not (p.presence_penalty or p.frequency_penalty or p.logit_bias or p.bad_words)
        )
        self.cuts = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.output)

    def room(self, max_model_len: int) -> int:
        """Tokens that it may still have."""
        limit = min(self.request.params.max_tokens, max_model_len - len(self.request.prompt))
        return limit - len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens at positions ``start .. stop - 1``."""
        assert 0 <= start <= stop <= self.length, (start, stop, self.length)
        prompt = self.request.prompt
        return [*prompt[start:stop], *self.output[max(start - len(prompt), 0) : max(stop - len(prompt), 0)]]


class Slots:
    """Who sits in each slot, and its block tables; index ``position // block_size``, ``ABSENT`` where there is no block."""

    def __init__(self, count: int, *, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        columns = -(-max_model_len // block_size)
        self.blocks = np.full((count, columns), ABSENT, dtype=np.int64)
        self.window_blocks = np.full((count, columns), ABSENT, dtype=np.int64)
        self.window_start = np.zeros(count, dtype=np.int64)
        self.filled = np.zeros((2, count), dtype=np.int64)  # table entries that are known, global and window
        self._holders: list[History | None] = [None] * count
        self.known = np.zeros(count, dtype=np.int64)  # tokens of the holder when it took the slot
        self._computed = [0] * count  # at admission, until the first span

    @staticmethod
    def bytes_per_slot(max_model_len: int, *, block_size: int) -> int:
        """Memory of one slot's two tables."""
        return 2 * np.dtype(np.int64).itemsize * -(-max_model_len // block_size)

    def holder(self, slot: int) -> History:
        """Whose slot it is."""
        holder = self._holders[slot]
        assert holder is not None, f"slot {slot} is empty"
        return holder

    def take(self, admission: Admission, history: History) -> None:
        """Put ``history`` into its slot, with empty tables."""
        slot = admission.slot
        assert self._holders[slot] is None, f"slot {slot} is taken"
        self._holders[slot] = history
        self.known[slot] = history.length
        self._computed[slot] = admission.computed
        self.window_start[slot] = 0

    def drop(self, slot: int) -> None:
        """Empty ``slot``; its blocks may belong to somebody else from now on."""
        self.holder(slot)
        self._holders[slot] = None
        self.blocks[slot] = ABSENT
        self.window_blocks[slot] = ABSENT
        self.filled[:, slot] = 0

    def extend(self, span: Span) -> None:
        """Append what ``span`` brings to its slot's tables, and fix what its windows may see."""
        slot = span.slot
        if span.replay and self.filled[0, slot] == 0:  # the first span of a bounded hit
            assert span.start == self._computed[slot], "a replay starts where the admission says"
            self.window_start[slot] = span.start
        _append(self.blocks[slot], span.blocks, start=int(self.filled[0, slot]))
        self.filled[0, slot] += len(span.blocks)
        start = max(int(self.filled[1, slot]), span.window_base)
        _append(self.window_blocks[slot], span.window_blocks, start=start)
        self.filled[1, slot] = start + len(span.window_blocks)
        end = span.start + span.length
        held = self.filled[:, slot] * self.block_size
        assert end <= held.min(), f"slot {slot} has blocks for {held} tokens and runs rows up to {end}"

    def receiving(self, span: Span) -> tuple[np.ndarray, np.ndarray]:
        """The global and window blocks of the positions before ``span`` whose records come from outside: whole blocks, whose
        other records are written later.
        """
        columns = slice((span.start - span.transferred) // self.block_size, -(-span.start // self.block_size))
        windows = self.window_blocks[span.slot, columns]
        return self.blocks[span.slot, columns], windows[windows != ABSENT]


def _append(table: np.ndarray, blocks: tuple[int, ...], *, start: int) -> None:
    table[start : start + len(blocks)] = blocks
