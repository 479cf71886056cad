"""What is measured: a case as it is written, and the batches that it means.

A case is ``[N*]Q[@K][c][:D]``: N requests of Q new rows each behind K tokens of context. With ``:D``, or where K is given and Q
is no more than a draft block and its anchor, the rows are one step of decoding (the newest token and its drafts; D are drafted
next). Otherwise they end a prompt: past the last KV source only the last rows run (bounded replay), and one row a request is
sampled. With ``c`` they are a piece from a prompt's middle: nothing runs past that source. Cache contents are random and valid.
Suffixes: T rows, R requests, B table columns, N look-back columns.
"""

import re

import msgspec
import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.model.batch import DraftBatch, ForwardBatch
from flashstep.quant import mxfp4

WRITTEN = re.compile(r"(?:([0-9]+)\*)?([0-9]+)(?:@([0-9]+))?(c?)(?::([0-9]+))?")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` of ``rows`` new rows each, behind ``context`` tokens; ``drafts`` None: a piece of a prompt."""

    requests: int
    rows: int
    context: int
    continues: bool
    drafts: int | None

    @classmethod
    def parse(cls, text: str, *, draft_block: int) -> "Case":
        """Read ``[N*]Q[@K][c][:D]``; ``ConfigError`` for anything else."""
        found = WRITTEN.fullmatch(text)
        if found is None:
            raise ConfigError(
                "the case", [f"it is {text!r}; it is written [N*]Q[@K][c][:D], e.g. 8*6@131072"]
            )
        requests, rows, context = int(found[1] or 1), int(found[2]), int(found[3] or 0)
        continues, drafts = bool(found[4]), None if found[5] is None else int(found[5])
        if requests < 1 or rows < 1:
            raise ConfigError("the case", [f"{text} has no rows; N and Q are at least 1"])
        if drafts is None and not continues and rows <= draft_block + 1 and context:
            drafts = draft_block
        return cls(requests=requests, rows=rows, context=context, continues=continues, drafts=drafts)

    @property
    def decodes(self) -> bool:
        return self.drafts is not None

    @property
    def name(self) -> str:
        depth = "" if self.drafts is None else f":{self.drafts}"
        return f"{self.requests}*{self.rows}@{self.context}{'c' if self.continues else ''}{depth}"

    def blocks(self, *, block_size: int) -> int:
        """Global blocks that all its requests hold."""
        return self.requests * -(-(self.context + self.rows) // block_size)

    def window_blocks(self, *, block_size: int, window: int) -> int:
        """Window blocks that all its requests hold."""
        return self.requests * len(self._window_columns(block_size=block_size, window=window))

    def _window_columns(self, *, block_size: int, window: int) -> range:
        first = max(self.context - window, 0) // block_size
        return range(first, -(-(self.context + self.rows) // block_size))

    def _kept_rows(self, model: ModelConfig) -> int:
        """Rows of a prompt's piece that run past the last KV source."""
        if self.continues:
            return 0
        return min(self.rows, model.sliding_window) if model.last_kv_source is not None else self.rows

    def forward_batch(self, model: ModelConfig, pool: CachePool) -> ForwardBatch:
        """The rows of one step; request i has slot i and blocks of its own, as far as ``pool`` goes."""
        device, size = pool.device, pool.block_size
        rows = self.requests * self.rows
        columns = -(-(self.context + self.rows) // size)
        table_RB = torch.arange(self.requests * columns, device=device) % pool.num_blocks
        window_RB = torch.full((self.requests, columns), -1, dtype=torch.int64, device=device)
        held = self._window_columns(block_size=size, window=model.sliding_window)
        window_RB[:, held.start :] = (
            torch.arange(self.requests * len(held), device=device) % pool.num_window_blocks
        ).view(self.requests, -1)
        generator = torch.Generator(device).manual_seed(1)
        lookback = max(model.engram_max_ngram_size, 1)
        starts = torch.full((self.requests,), 0, dtype=torch.int64, device=device)
        wanted = tail_rows = None
        if not self.decodes:
            kept = self._kept_rows(model)
            last = torch.arange(1, self.requests + 1, device=device) * self.rows - 1
            tail_rows = (last.unsqueeze(1) - torch.arange(kept - 1, -1, -1, device=device)).flatten()
            wanted = (torch.arange(1, self.requests + 1, device=device) * kept - 1)[: None if kept else 0]
            starts += self.context + self.rows - kept
        return ForwardBatch(
            input_ids_T=torch.randint(model.vocab_size, (rows,), generator=generator, device=device),
            positions_T=(self.context + torch.arange(self.rows, device=device)).repeat(self.requests),
            request_T=torch.arange(self.requests, device=device).repeat_interleave(self.rows),
            slot_R=torch.arange(self.requests, device=device),
            block_table_RB=table_RB.view(self.requests, columns),
            window_table_RB=window_RB,
            window_start_R=torch.zeros_like(starts),
            store_T=torch.ones(rows, dtype=torch.bool, device=device),
            lookback_TN=torch.randint(
                model.engram_compressed_vocab_size, (rows, lookback), generator=generator, device=device
            ),
            logit_rows=wanted,
            tail_start_R=None if tail_rows is None else starts,
            tail_rows=tail_rows,
        )


def draft_batch(batch: ForwardBatch, anchor_R: Tensor, position_R: Tensor) -> DraftBatch:
    """The draft's inputs behind ``batch``."""
    return DraftBatch(
        anchor_R=anchor_R,
        position_R=position_R,
        window_table_RB=batch.window_table_RB,
        window_start_R=batch.window_start_R,
    )


def fill(pool: CachePool, model: ModelConfig) -> None:
    """Random records everywhere: values of order one, scales spread over a few binades, never NaN.

    Index keys are what the model stores, MXFP4 of normal vectors (its keys are RMS-normed): a key's four scales lie within two
    binades, which the scan's integer form asks for. Scales drawn from five, as here before, took its slower form everywhere.
    """
    generator = torch.Generator(pool.device).manual_seed(2)
    for layer in pool.window_layers:
        values, scales = pool.window(layer).planes
        _random(values, 0, 256, generator, mask=0xBF)
        _random(scales, 125, 130, generator)
    for layer in model.kv_source_layer_ids:
        view = pool.source(layer)
        _random(view.compressed[0], 0, 256, generator)
        _random(view.compressed[1], 0x28, 0x40, generator)  # E4M3 scales from 1/4 to 2
        _normal_keys(*view.index_keys, generator)
        if view.tail is not None:
            view.tail.normal_(generator=generator)


def _random(plane: Tensor, low: int, high: int, generator: torch.Generator, *, mask: int = 0xFF) -> None:
    """Fill a strided uint8 plane in pieces, so that nothing large is made beside it."""
    for piece in plane.split(4096):
        drawn = torch.randint(
            low, high, piece.shape, dtype=torch.uint8, generator=generator, device=piece.device
        )
        piece.copy_(drawn.bitwise_and_(mask))


def _normal_keys(values: Tensor, scales: Tensor, generator: torch.Generator) -> None:
    """Fill uint8 planes [blocks, records, K / 2] and [blocks, records, K / 32] with keys, in pieces likewise."""
    for value, scale in zip(values.split(1024), scales.split(1024), strict=True):
        shape = (*value.shape[:-1], 2 * value.shape[-1])
        drawn = torch.randn(shape, generator=generator, device=value.device)
        for plane, stored in zip((value, scale), mxfp4.quantise(drawn), strict=True):
            plane.copy_(stored)
