"""The tensors of KV memory, and one view a layer.

Owns one uint8 tensor of blocks a layer (window records), two a KV source (compressed records, index keys), and the fp32 tail
ring of each ratio-2 source. A layer is given its view when it is built; which block holds what is the block tables' affair.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.cache.groups import CacheGroups, Record
from flashstep.cache.records import Planes, block_bytes, split_planes

POISON_BYTE = 0xFF  # NaN as E4M3 value, as E8M0 scale and as E4M3 scale: a stray read cannot pass unseen


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowView:
    """One layer's window records: MXFP8 planes of ``block_size`` records a block."""

    planes: Planes
    block_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceView:
    """One KV source's global KV: NVFP4 compressed planes and MXFP4 index key planes, ``block_size // ratio`` records a block.

    ``tail`` is fp32 [slots, ring, 2, head_dim] (value, score) for ratio 2 and None for ratio 1.
    """

    compressed: Planes
    index_keys: Planes
    block_size: int
    ratio: int
    tail: Tensor | None


class CachePool:
    """All KV memory of one rank. ``num_slots`` is how many requests may hold a tail ring at once."""

    def __init__(
        self,
        groups: CacheGroups,
        *,
        num_blocks: int,
        num_window_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        if block_size < 2 or block_size % 2:
            raise ValueError(
                f"block_size is {block_size}; it must be even, so that a ratio-2 group stays in one block"
            )

        def blocks(count: int, record: Record, records_per_block: int) -> Tensor:
            size = block_bytes(record, records_per_block=records_per_block)
            # not cleared: nothing unwritten is ever read (tests poison it), and a pool costs memory only as it fills
            return torch.empty(count, size, dtype=torch.uint8, device=device)

        self.device = device
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        self._window = {
            layer: blocks(num_window_blocks, groups.window, block_size) for layer in groups.window_layers
        }
        self._compressed = {
            s: blocks(num_blocks, groups.compressed, block_size // r) for s, r in groups.sources
        }
        self._index_keys = {
            s: blocks(num_blocks, groups.index_key, block_size // r) for s, r in groups.sources
        }
        self._tail = {
            source: torch.zeros(
                num_slots, groups.tail_ring, 2, groups.head_dim, dtype=torch.float32, device=device
            )
            for source, ratio in groups.sources
            if ratio == 2
        }
        self._groups = groups

    def window(self, layer: int) -> WindowView:
        """The window records of ``layer``."""
        planes = split_planes(self._window[layer], self._groups.window, records_per_block=self.block_size)
        return WindowView(planes=planes, block_size=self.block_size)

    def source(self, layer: int) -> SourceView:
        """The global KV of KV source ``layer``."""
        ratio = dict(self._groups.sources)[layer]
        records = self.block_size // ratio
        return SourceView(
            compressed=split_planes(
                self._compressed[layer], self._groups.compressed, records_per_block=records
            ),
            index_keys=split_planes(
                self._index_keys[layer], self._groups.index_key, records_per_block=records
            ),
            block_size=self.block_size,
            ratio=ratio,
            tail=self._tail.get(layer),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one global block over all sources."""
        return sum(t.shape[1] for t in (*self._compressed.values(), *self._index_keys.values()))

    @property
    def window_block_bytes(self) -> int:
        """Bytes of one window block over all layers."""
        return sum(t.shape[1] for t in self._window.values())

    @property
    def total_bytes(self) -> int:
        """Everything this pool holds."""
        tensors = (
            *self._window.values(),
            *self._compressed.values(),
            *self._index_keys.values(),
            *self._tail.values(),
        )
        return sum(t.numel() * t.element_size() for t in tensors)

    def poison(self) -> None:
        """Fill everything with NaN patterns, so that a read of what nobody wrote shows (tests, and debugging)."""
        for tensor in (*self._window.values(), *self._compressed.values(), *self._index_keys.values()):
            tensor.fill_(POISON_BYTE)
        for tensor in self._tail.values():
            tensor.fill_(float("nan"))

    def poison_blocks(self, blocks: Tensor) -> None:
        """Fill the global ``blocks`` (int64 ids) with NaN patterns: they were released."""
        for tensor in (*self._compressed.values(), *self._index_keys.values()):
            tensor[blocks] = POISON_BYTE

    def poison_window_blocks(self, blocks: Tensor) -> None:
        """Fill the window ``blocks`` (int64 ids) with NaN patterns: they were released."""
        for tensor in self._window.values():
            tensor[blocks] = POISON_BYTE
