"""Writing: shards, index, and the refusal of what could not be read back; dummy weights."""

import json
from pathlib import Path

import pytest
import torch

from flashstep.config.model import ModelConfig
from flashstep.weights.dummy import DummyWeights
from flashstep.weights.load import dummy_weights, load_weights
from flashstep.weights.names import stored_tensors
from flashstep.weights.reader import Checkpoint, CheckpointError
from flashstep.weights.write import write_checkpoint
from tests.weights.conftest import SHARD_BYTES, tiny_json, weight_map


@pytest.fixture(scope="module")
def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    dummy = DummyWeights(config, 7)
    return {name: dummy.tensor(name) for name in dummy.stored}


def test_round_trip(tmp_path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, tiny_json(), tensors=tensors, shard_bytes=SHARD_BYTES)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.problems == []
    for name, tensor in tensors.items():
        assert checkpoint.tensor(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name).view(torch.uint8), tensor.view(torch.uint8)), name
    assert ModelConfig.read(tmp_path) == config
    load_weights(tmp_path, config)


def test_shards_are_bounded_and_counted(written: Path) -> None:
    files = sorted(set(weight_map(written).values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [(written / file).stat().st_size for file in files]
    assert max(sizes) < SHARD_BYTES + 100_000  # and the header
    assert all((written / file).stat().st_mode & 0o777 == 0o644 for file in files)  # others may read them
    total = json.loads((written / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total < sum(sizes) < total + 100_000 * len(files)


def test_uint8_is_taken_for_bytes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    raw = {
        n: t.view(torch.uint8) if t.dtype in (torch.int8, torch.float8_e8m0fnu) else t
        for n, t in tensors.items()
    }
    write_checkpoint(tmp_path, tiny_json(), tensors=raw)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entries["layers.0.ffn.experts.0.w1.weight"].dtype == "I8"
    assert checkpoint.entries["layers.0.ffn.experts.0.w1.scale"].dtype == "F8_E8M0"


def test_what_does_not_fit_is_refused_at_once(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    wrong = dict(tensors)
    del wrong["norm.weight"]
    wrong["extra"] = torch.ones(1)
    wrong["head.weight"] = wrong["head.weight"].float()
    wrong["layers.0.attn.attn_sink"] = torch.ones(5)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "out", tiny_json(), tensors=wrong)
    assert len(caught.value.problems) == 4
    assert not (tmp_path / "out").exists()


def test_dummy_tensors_depend_on_seed_and_name_only(config: ModelConfig) -> None:
    one, two, other = DummyWeights(config, 1), DummyWeights(config, 1), DummyWeights(config, 2)
    for name in reversed(one.stored):
        two.tensor(name)
    for name in stored_tensors(config):
        tensor = one.tensor(name).view(torch.uint8)
        assert torch.equal(tensor, two.tensor(name).view(torch.uint8)), name
        if tensor.numel() > 16:
            assert not torch.equal(tensor, other.tensor(name).view(torch.uint8)), name


def test_dummy_spreads(config: ModelConfig) -> None:
    """No branch is degenerate (spec/model.md 13)."""
    dummy = DummyWeights(config, 5)

    def values(ending: str) -> torch.Tensor:
        return torch.cat([dummy.tensor(n).float().flatten() for n in dummy.stored if n.endswith(ending)])

    assert values("attn_sink").std() == pytest.approx(0.5, rel=0.2)
    assert values("gate.bias").std() == pytest.approx(0.1, rel=0.3)
    assert values("hc_attn_base").std() == pytest.approx(0.5, rel=0.2)
    scales = values("hc_ffn_scale")
    assert 0.5 <= scales.min() < 0.7 and 1.3 < scales.max() <= 1.5
    assert values("attn_norm.weight").mean() == pytest.approx(1, abs=0.02)
    assert values("attn_norm.weight").std() == pytest.approx(0.1, rel=0.2)
    weights = dummy_weights(config, seed=5).weights
    for name in ("layers.3.attn.wq_b.weight", "layers.3.ffn.experts.w1"):
        weight = weights[name]
        fan_in = weight.shape[-1]
        assert weight.dequantise().std() == pytest.approx(fan_in**-0.5, rel=0.6)
        assert len(weight.scale.unique()) == 3  # neighbouring scales differ
