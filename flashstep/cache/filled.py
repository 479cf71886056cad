"""Caches as if a prompt had run somewhere else and its records had been handed over: every record holds the same kind of value.

Takes blocks and a slot, writes records of all groups into them: windows (the draft's too), entries, index keys, tails. For
measuring what follows long prompts that nobody computes (spec/serving.md E7); texts mean nothing. Knows no request.
"""

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.cache.records import Planes
from flashstep.quant.tensor import MXFP4, MXFP8, NVFP4, Format

MEAN = 0.015  # of every value, before its format rounds it
PATTERNS = 64  # blocks of records that are drawn, where values differ
PIECE = 4096  # blocks that are written at once


class FilledCache:
    """Fills blocks of ``pool``; values are ``MEAN`` plus normal noise of ``std``.

    With noise, block n of a group holds pattern n modulo ``PATTERNS``, drawn once: a prompt of a million tokens is filled as fast
    as memory is written.
    """

    def __init__(self, pool: CachePool, *, std: float = 0.0, seed: int = 0) -> None:
        self._device = pool.device
        self._std = std
        self._generator = torch.Generator(pool.device).manual_seed(seed)
        self._drawn: dict[tuple[str, tuple[int, ...]], Planes] = {}
        windows = [pool.window(layer).planes for layer in pool.window_layers]
        sources = [pool.source(layer) for layer in pool.sources]
        self._windows = [(planes, self._patterns(planes, MXFP8)) for planes in windows]
        self._global = [
            (planes, self._patterns(planes, format))
            for source in sources
            for planes, format in ((source.compressed, NVFP4), (source.index_keys, MXFP4))
        ]
        self._tails = [source.tail for source in sources if source.tail is not None]

    def fill(self, slot: int, blocks: Tensor, window_blocks: Tensor) -> None:
        """Records into global ``blocks`` and ``window_blocks`` (int64 ids on the device), and tails into ``slot``. Queued."""
        for places, group in ((blocks, self._global), (window_blocks, self._windows)):
            for planes, patterns in group:
                for plane, pattern in zip(planes, patterns, strict=True):
                    for piece in places.split(PIECE):
                        plane[piece] = pattern[piece % len(pattern)]
        for tail in self._tails:
            tail[slot] = self._values(*tail.shape[1:])

    def _patterns(self, planes: Planes, format: Format) -> Planes:
        """Blocks of records such as ``planes`` hold, uint8 [P, records, bytes] of values and of scales."""
        values, scales = planes
        known = self._drawn.get((format.name, values.shape[1:]))
        if known is not None:
            return known
        records, data_bytes = values.shape[1:]
        width = data_bytes * format.values_per_byte
        data, scale = format.quantise(self._values(PATTERNS if self._std else 1, records, width))
        found = data.view(torch.uint8), scale.view(torch.uint8)
        assert (found[0].shape[1:], found[1].shape[1:]) == (values.shape[1:], scales.shape[1:])
        self._drawn[format.name, values.shape[1:]] = found
        return found

    def _values(self, *shape: int) -> Tensor:
        noise = torch.zeros(shape, device=self._device)
        if self._std:
            noise.normal_(std=self._std, generator=self._generator)
        return noise + MEAN
