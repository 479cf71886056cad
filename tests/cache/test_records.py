"""The bytes of a block: values first, then scales, as views of one tensor."""

import torch

from flashstep.cache.groups import CacheGroups, Record
from flashstep.cache.records import block_bytes, split_planes
from flashstep.quant.tensor import MXFP4, MXFP8, NVFP4
from tests.model import tiny

RELEASED = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "dspark_target_layer_ids": [37, 38, 39],
}


def released_groups() -> CacheGroups:
    return CacheGroups.of(tiny.configuration("A", **RELEASED))


def test_records_have_the_released_sizes() -> None:
    """spec/model.md 10: 528, 288 and 68 bytes, 890 bytes of global KV a token, 2,703,360 bytes of window a sequence."""
    groups = released_groups()
    assert (groups.window.bytes, groups.compressed.bytes, groups.index_key.bytes) == (528, 288, 68)
    assert groups.global_bytes_per_token == 890
    assert groups.window_bytes_per_token * groups.sliding_window == 2_703_360


def test_records_are_what_the_formats_need() -> None:
    groups = released_groups()
    for record, form, channels in (
        (groups.window, MXFP8, 512),
        (groups.compressed, NVFP4, 512),
        (groups.index_key, MXFP4, 128),
    ):
        assert record.bytes == form.row_bytes(channels)
        assert record.data_bytes * form.values_per_byte == channels


def test_a_block_holds_all_values_then_all_scales() -> None:
    record = Record(data_bytes=3, scale_bytes=2)
    size = block_bytes(record, records_per_block=4)
    blocks = torch.arange(2 * size, dtype=torch.uint8).view(2, size)
    values, scales = split_planes(blocks, record, records_per_block=4)
    assert values[1, 2].tolist() == [size + 6, size + 7, size + 8]
    assert scales[1, 2].tolist() == [size + 12 + 4, size + 12 + 5]
    values[0, 0], scales[0, 3] = 77, 88
    assert blocks[0, :3].tolist() == [77] * 3 and blocks[0, -2:].tolist() == [88, 88]
