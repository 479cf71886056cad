"""A hand-made runner for model tests: builds ``ForwardBatch`` for chosen spans, with chosen block numbers.

Test-side only: it decides block tables and chunk cuts that the real scheduler never would. Knows nothing of sampling.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.config.model import ModelConfig
from flashstep.kernels import choose_ops
from flashstep.model.batch import DraftBatch, ForwardBatch
from flashstep.model.dspark import DraftBlock
from flashstep.model.transformer import Transformer

CPU = torch.device("cpu")


@dataclasses.dataclass
class Held:
    """One request: its tokens, its block tables, how far it has run."""

    tokens: list[int]
    slot: int
    blocks: list[int]
    window_blocks: list[int]
    done: int = 0
    window_start: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows ``start .. stop - 1`` of a sequence in one step."""

    sequence: Held
    stop: int
    start: int | None = None
    replay: int = 0


class Driver:
    """A model with its pool, and the free lists that tests permute."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping,
        tables: Mapping,
        *,
        token_map: Tensor,
        block_size: int = 4,
        num_blocks: int = 256,
        num_slots: int = 8,
        seed: int | None = None,
        drafts: bool = False,
    ) -> None:
        self.config = config
        self.token_map = token_map
        self.pool = CachePool(
            CacheGroups.of(config, drafts=drafts),
            num_blocks=num_blocks,
            num_window_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            device=CPU,
        )
        self.pool.poison()
        self.model = Transformer(
            config, weights, ops=choose_ops(CPU), pool=self.pool, engram_tables=tables, drafts=drafts
        )
        self.block_size = block_size
        self._num = (num_blocks, num_slots)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        """Poison all memory and permute the free lists (ascending without a seed)."""
        blocks, slots = self._num
        self.pool.poison()
        self._free, self._free_window, self._slots = (list(range(n))[::-1] for n in (blocks, blocks, slots))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for free in (self._free, self._free_window, self._slots):
                free[:] = [free[i] for i in torch.randperm(len(free), generator=generator).tolist()]

    def open(self, tokens: Sequence[int]) -> Held:
        """A new sequence that holds no block yet."""
        return Held(list(tokens), self._slots.pop(), [], [])

    def step(self, chunks: Sequence[Chunk], *, logits: str = "all", tail: int | None = None) -> list[Tensor]:
        """Run the chunks as one forward; the fp32 logits of each chunk's rows, or [none] ("none").

        ``tail`` is the first position that layers past the last KV source run on; logits then are of rows from there on.
        """
        ids, positions, request, store, lookback, kept, counts = [], [], [], [], [], [], []
        for number, chunk in enumerate(chunks):
            s = chunk.sequence
            start = s.done if chunk.start is None else chunk.start
            self._grow(s, chunk.stop)
            rows = range(start, chunk.stop)
            base = len(ids)
            ids += [s.tokens[t] for t in rows]
            positions += rows
            request += [number] * len(rows)
            store += [t >= start + chunk.replay for t in rows]
            lookback += [self._lookback(s, t) for t in rows]
            size = sum(t >= (tail or 0) for t in rows)
            kept += range(base + len(rows) - size, base + len(rows))
            counts.append(size)
            s.done = chunk.stop
        sequences = [chunk.sequence for chunk in chunks]
        batch = ForwardBatch(
            input_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            request_T=torch.tensor(request),
            slot_R=torch.tensor([s.slot for s in sequences]),
            block_table_RB=_table([s.blocks for s in sequences]),
            window_table_RB=_table([s.window_blocks for s in sequences]),
            window_start_R=torch.tensor([s.window_start for s in sequences]),
            store_T=torch.tensor(store),
            lookback_TN=torch.tensor(lookback),
            logit_rows=torch.arange(0 if logits == "none" else len(kept)),
            tail_start_R=None if tail is None else torch.full((len(chunks),), tail),
            tail_rows=None if tail is None else torch.tensor(kept, dtype=torch.int64),
        )
        out = self.model.forward(batch)
        return [out] if logits == "none" else list(out.split(counts))

    def run(self, tokens: Sequence[int], *, cuts: Sequence[int] = (), tail: int | None = None) -> Tensor:
        """All logits of one sequence alone, in chunks that end at ``cuts`` and at the end."""
        sequence = self.open(tokens)
        steps = [self.step([Chunk(sequence, stop)], tail=tail)[0] for stop in (*cuts, len(tokens))]
        self.close(sequence)
        return torch.cat(steps)

    def propose(self, sequences: Sequence[Held]) -> DraftBlock:
        """One draft block a sequence; its anchor is the token behind those that have run."""
        assert self.model.draft is not None
        return self.model.draft.propose(
            DraftBatch(
                anchor_R=torch.tensor([s.tokens[s.done] for s in sequences]),
                position_R=torch.tensor([s.done for s in sequences]),
                window_table_RB=_table([s.window_blocks for s in sequences]),
                window_start_R=torch.tensor([s.window_start for s in sequences]),
            )
        )

    def close(self, sequence: Held) -> None:
        """Give the sequence's blocks and slot back, poisoned."""
        self.pool.poison_blocks(torch.tensor(sequence.blocks, dtype=torch.int64))
        held = [b for b in sequence.window_blocks if b >= 0]
        self.pool.poison_window_blocks(torch.tensor(held, dtype=torch.int64))
        self._free += sequence.blocks
        self._free_window += held
        self._slots.append(sequence.slot)

    def drop_window(self, sequence: Held) -> None:
        """Release and poison the window blocks that no coming row reads, as the scheduler does."""
        behind = max(0, sequence.done - self.config.sliding_window + 1) // self.block_size
        for place in range(behind):
            block = sequence.window_blocks[place]
            if block >= 0:
                self.pool.poison_window_blocks(torch.tensor([block]))
                self._free_window.insert(0, block)
                sequence.window_blocks[place] = -1

    def _grow(self, s: Held, stop: int) -> None:
        while len(s.blocks) * self.block_size < stop:
            s.blocks.append(self._free.pop())
        while len(s.window_blocks) * self.block_size < stop:
            s.window_blocks.append(self._free_window.pop())

    def _lookback(self, s: Held, t: int) -> list[int]:
        pad = int(self.token_map[self.config.engram_pad_token_id])
        places = range(self.config.engram_max_ngram_size)
        return [int(self.token_map[s.tokens[t - n]]) if t >= n else pad for n in places]


def _table(rows: list[list[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
