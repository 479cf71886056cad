"""The layout of records inside a block: all values of the block's records first, then all their scales (block-split).

Takes a pool tensor of whole blocks, gives the two strided views that kernels read and write. Knows sizes, not meanings: what
the bytes say is ``flashstep.quant``'s.
"""

import torch
from torch import Tensor

from flashstep.cache.groups import Record

Planes = tuple[
    Tensor, Tensor
]  # uint8 values [blocks, records, data_bytes], uint8 scales [blocks, records, scale_bytes]


def block_bytes(record: Record, *, records_per_block: int) -> int:
    """Bytes of one block of one group and layer."""
    return record.bytes * records_per_block


def split_planes(blocks: Tensor, record: Record, *, records_per_block: int) -> Planes:
    """Views of uint8 [blocks, records_per_block * record.bytes] as values and scales; nothing is copied."""
    assert blocks.dtype is torch.uint8 and blocks.shape[1] == block_bytes(
        record, records_per_block=records_per_block
    )
    border = record.data_bytes * records_per_block
    values = blocks[:, :border].unflatten(1, (records_per_block, record.data_bytes))
    scales = blocks[:, border:].unflatten(1, (records_per_block, record.scale_bytes))
    return values, scales
