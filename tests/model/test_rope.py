"""Frequency tables: the golden values of spec/model.md 13, and which layers get which."""

import pytest
import torch

from flashstep.model.rope import compressed_frequencies, window_frequencies
from tests.model import tiny

RELEASED = {"qk_rope_head_dim": 64, "index_head_dim": 64}
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
GOLDEN = {15: 3.6355386e-3, 16: 2.265625e-3, 20: 2.9697768e-4, 25: 5.3723127e-6, 31: 5.6805290e-7}


def test_compressed_layers_blend_by_yarn() -> None:
    frequencies = compressed_frequencies(tiny.configuration("A", **RELEASED, rope_scaling=YARN))
    assert frequencies.dtype is torch.float32 and frequencies.shape == (32,)
    for pair, value in GOLDEN.items():
        assert frequencies[pair].item() == pytest.approx(value, rel=1e-6)
    assert frequencies[0] == 1


def test_window_layers_are_not_scaled() -> None:
    frequencies = window_frequencies(tiny.configuration("A", **RELEASED, rope_scaling=YARN))
    torch.testing.assert_close(frequencies, 10000.0 ** (-torch.arange(32) / 32), rtol=1e-6, atol=0)
