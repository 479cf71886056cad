"""The tensors of KV memory, and one view a layer.

Owns a uint8 tensor of blocks of all layers' window records, two a KV source (compressed records, index keys), and the fp32 tail
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

        self.device = device
        self.block_size = block_size
        self._groups = groups
        self._window: dict[int, Tensor] = {}
        self._compressed: dict[int, Tensor] = {}
        self._index_keys: dict[int, Tensor] = {}
        self._given_out: list[tuple[Planes, dict[int, Tensor], int, Record, int]] = []
        self._allocate(num_blocks, num_window_blocks)
        self._tail = {
            source: torch.zeros(
                num_slots, groups.tail_ring, 2, groups.head_dim, dtype=torch.float32, device=device
            )
            for source, ratio in groups.sources
            if ratio == 2
        }

    def _allocate(self, num_blocks: int, num_window_blocks: int) -> None:
        def blocks(*counts: int, record: Record, records_per_block: int) -> Tensor:
            size = block_bytes(record, records_per_block=records_per_block)
            # not cleared: nothing unwritten is ever read (tests poison it), and a pool costs memory only as it fills
            return torch.empty(*counts, size, dtype=torch.uint8, device=self.device)

        groups, size = self._groups, self.block_size
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        windows = blocks(
            len(groups.window_layers), num_window_blocks, record=groups.window, records_per_block=size
        )  # one behind the other, so that the records of all draft layers can be written at once
        self._window.update(zip(groups.window_layers, windows, strict=True))
        for source, ratio in groups.sources:
            records = size // ratio
            self._compressed[source] = blocks(num_blocks, record=groups.compressed, records_per_block=records)
            self._index_keys[source] = blocks(num_blocks, record=groups.index_key, records_per_block=records)

    def resize(self, num_blocks: int, num_window_blocks: int) -> None:
        """Other numbers of blocks, with nothing in them; views that were given out are of the new memory from now on.

        How many fit is known when a model stands over a pool and was measured.
        """
        for tensors in (self._window, self._compressed, self._index_keys):
            tensors.clear()  # given back before anything new is taken
        for planes, *_ in self._given_out:
            for plane in planes:
                _follow(plane, plane.new_empty(0))
        self._allocate(num_blocks, num_window_blocks)
        for planes, tensors, layer, record, records in self._given_out:
            for plane, new in zip(
                planes, split_planes(tensors[layer], record, records_per_block=records), strict=True
            ):
                _follow(plane, new)

    def _planes(self, tensors: dict[int, Tensor], layer: int, record: Record, records: int) -> Planes:
        planes = split_planes(tensors[layer], record, records_per_block=records)
        self._given_out.append((planes, tensors, layer, record, records))
        return planes

    @property
    def window_layers(self) -> tuple[int, ...]:
        """The layers that keep windows, the draft's last."""
        return tuple(self._window)

    @property
    def sources(self) -> tuple[int, ...]:
        """The layers that are KV sources."""
        return tuple(self._compressed)

    def window(self, layer: int) -> WindowView:
        """The window records of ``layer``."""
        planes = self._planes(self._window, layer, self._groups.window, self.block_size)
        return WindowView(planes=planes, block_size=self.block_size)

    def source(self, layer: int) -> SourceView:
        """The global KV of KV source ``layer``."""
        ratio = dict(self._groups.sources)[layer]
        records = self.block_size // ratio
        return SourceView(
            compressed=self._planes(self._compressed, layer, self._groups.compressed, records),
            index_keys=self._planes(self._index_keys, layer, self._groups.index_key, records),
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

    def clear(self) -> None:
        """Zeros everywhere: records that anybody may read (measuring)."""
        for tensor in (*self._window.values(), *self._compressed.values(), *self._index_keys.values()):
            tensor.zero_()

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


def _follow(view: Tensor, source: Tensor) -> None:
    """Make ``view`` a view of what ``source`` is one of."""
    view.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
