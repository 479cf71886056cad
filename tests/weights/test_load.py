"""Loading: what is given, and that everything wrong is refused at once, before any tensor is read (case A33)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashstep.config.model import ModelConfig
from flashstep.quant.tensor import FP8_BLOCK, MXFP4, QuantTensor
from flashstep.weights.load import dummy_weights, load_weights
from flashstep.weights.names import Kind, parameters
from flashstep.weights.reader import Checkpoint, CheckpointError
from tests.weights.conftest import set_weight_map, weight_map

VECTORS = Path(__file__).parents[3].joinpath("shared/vectors/model")
SCALE = "layers.2.attn.wq_b.scale"
EXPERT_SCALE = "layers.5.ffn.experts.3.w2.scale"


def _problems(folder: Path, config: ModelConfig) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, config)
    return list(caught.value.problems)


def _edit(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Apply ``change`` to the tensors of the shard that holds ``name``; gives the shard's file name."""
    file = weight_map(folder)[name]
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file)
    return file


def test_loads_what_was_written(written: Path, config: ModelConfig) -> None:
    loaded = load_weights(written, config, drafts=True)
    made = dummy_weights(config, seed=3, drafts=True)
    assert loaded.weights.keys() == made.weights.keys()
    assert loaded.weights.keys() == {
        n for n, p in parameters(config).items() if p.kind is not Kind.ENGRAM_TABLE
    }
    for name, weight in loaded.weights.items():
        other = made.weights[name]
        if isinstance(weight, QuantTensor):
            assert (
                isinstance(other, QuantTensor)
                and weight.format is other.format
                and weight.shape == other.shape
            )
            assert torch.equal(weight.data.view(torch.uint8), other.data.view(torch.uint8)), name
            assert torch.equal(weight.scale, other.scale), name
        else:
            assert torch.equal(weight, other), name
    for layer, planes in loaded.engram.items():
        assert torch.equal(planes.values_RD.view(torch.uint8), made.engram[layer].values_RD.view(torch.uint8))
        assert torch.equal(planes.scales_RG.view(torch.uint8), made.engram[layer].scales_RG.view(torch.uint8))


def test_experts_are_stacked_in_order(written: Path, config: ModelConfig) -> None:
    experts = load_weights(written, config).weights["layers.5.ffn.experts.w2"]
    assert isinstance(experts, QuantTensor) and experts.format is MXFP4 and experts.shape == (4, 64, 32)
    checkpoint = Checkpoint(written)
    for expert in range(4):
        prefix = f"layers.5.ffn.experts.{expert}.w2"
        assert torch.equal(experts.data[expert], checkpoint.tensor(f"{prefix}.weight").view(torch.uint8))
        assert torch.equal(experts.scale[expert], checkpoint.tensor(f"{prefix}.scale").view(torch.uint8))


def test_drafts_are_left_out_unless_asked_for(written: Path, config: ModelConfig) -> None:
    assert not any(name.startswith("mtp.") for name in load_weights(written, config).weights)


def test_progress_counts_to_the_end(written: Path, config: ModelConfig) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(written, config, progress=lambda done, total: seen.append((done, total)))
    total = len(seen)
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_loaded_weights_outlive_their_files(folder: Path, config: ModelConfig) -> None:
    weights = load_weights(folder, config).weights
    before = {name: _bytes(weight).clone() for name, weight in weights.items()}
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as handle:
            handle.seek(file.stat().st_size // 2)
            handle.write(b"\x55" * (file.stat().st_size // 2))
    assert all(torch.equal(before[name], _bytes(weight)) for name, weight in weights.items())


def _bytes(weight: torch.Tensor | QuantTensor) -> torch.Tensor:
    tensor = weight.data if isinstance(weight, QuantTensor) else weight
    return tensor.reshape(-1).view(torch.uint8)


def test_a_single_file_without_index(folder: Path, config: ModelConfig) -> None:
    merged: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        merged |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(merged, folder / "model.safetensors")
    assert load_weights(folder, config).weights.keys() == dummy_weights(config, seed=3).weights.keys()


@pytest.mark.skipif(not VECTORS.is_dir(), reason="golden vectors are not here")
@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_golden_checkpoints(name: str) -> None:
    config = ModelConfig.read(VECTORS / name / "ckpt")
    loaded = load_weights(VECTORS / name / "ckpt", config, drafts=True)
    wq_a = loaded.weights["layers.0.attn.wq_a.weight"]
    assert isinstance(wq_a, QuantTensor) and wq_a.format is FP8_BLOCK
    assert wq_a.dequantise().std() == pytest.approx(config.hidden_size**-0.5, rel=0.5)
    assert sorted(loaded.engram) == list(config.engram_layer_ids)


def test_vision_tensors_are_skipped(folder: Path, config: ModelConfig) -> None:
    save_file(
        {"vision.norm.weight": torch.ones(4), "image_start": torch.ones(4)}, folder / "vision.safetensors"
    )
    extra = dict.fromkeys(("vision.norm.weight", "image_start"), "vision.safetensors")
    set_weight_map(folder, weight_map(folder) | extra)
    assert "image_start" not in load_weights(folder, config).weights


# ---- case A33: every kind of damage, each naming tensor and file ---------------------------------------------------------


def test_scale_missing_from_the_index(folder: Path, config: ModelConfig) -> None:
    places = weight_map(folder)
    file = places.pop(SCALE)
    set_weight_map(folder, places)
    assert _problems(folder, config) == [
        f"{SCALE} is in {file}, but model.safetensors.index.json does not list it"
    ]


def test_scale_missing_from_the_shard(folder: Path, config: ModelConfig) -> None:
    file = _edit(folder, EXPERT_SCALE, lambda tensors: tensors.pop(EXPERT_SCALE))
    assert _problems(folder, config) == [
        f"{EXPERT_SCALE} is not in {file}, where model.safetensors.index.json places it"
    ]


def test_tensor_missing_from_both(folder: Path, config: ModelConfig) -> None:
    _edit(folder, SCALE, lambda tensors: tensors.pop(SCALE))
    set_weight_map(folder, {name: file for name, file in weight_map(folder).items() if name != SCALE})
    assert _problems(folder, config) == [
        f"{SCALE} is missing: neither model.safetensors.index.json nor any shard holds it"
    ]


def test_deleted_shard(folder: Path, config: ModelConfig) -> None:
    file = weight_map(folder)[SCALE]
    (folder / file).unlink()
    (problem,) = _problems(folder, config)
    assert problem.startswith(f"{file} does not exist")
    assert all(name in problem for name, place in weight_map(folder).items() if place == file)


def test_truncated_shard(folder: Path, config: ModelConfig) -> None:
    file = weight_map(folder)[SCALE]
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-1000])
    (problem,) = _problems(folder, config)
    assert problem.startswith(f"{file} is damaged or cut short") and SCALE in problem
    (folder / file).write_bytes(data[:3])
    assert file in _problems(folder, config)[0]


def test_swapped_shards(folder: Path, config: ModelConfig) -> None:
    one, other = sorted(set(weight_map(folder).values()))[:2]
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)
    problems = _problems(folder, config)
    places = weight_map(folder)
    assert len(problems) == sum(file in (one, other) for file in places.values())
    name = next(name for name, file in places.items() if file == one)
    assert f"{name} is in {other}, but model.safetensors.index.json places it in {one}" in problems


def test_stray_tensor(folder: Path, config: ModelConfig) -> None:
    save_file({"layers.0.attn.ape": torch.ones(4)}, folder / "extra.safetensors")
    set_weight_map(folder, weight_map(folder) | {"layers.0.attn.ape": "extra.safetensors"})
    assert _problems(folder, config) == [
        "layers.0.attn.ape in extra.safetensors is unexpected: no tensor of this configuration has that name"
    ]


def test_tensor_in_two_shards(folder: Path, config: ModelConfig) -> None:
    save_file({"norm.weight": torch.ones(64, dtype=torch.bfloat16)}, folder / "zz.safetensors")
    (problem,) = _problems(folder, config)
    assert problem.startswith("norm.weight is in two shards") and "zz.safetensors" in problem


def test_everything_wrong_is_listed_at_once(folder: Path, config: ModelConfig) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["head.weight"] = tensors["head.weight"].float()
        tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
        tensors["stray"] = torch.ones(1)
        del tensors["embed.weight"]

    _edit(folder, "head.weight", change)
    problems = "\n".join(_problems(folder, config))
    assert "embed.weight is not in" in problems
    assert "dtype F32; expected BF16" in problems
    assert "shape [63]; expected [64]" in problems
    assert (
        "stray in model-00001-of" in problems
        and "but model.safetensors.index.json does not list it" in problems
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "has no weight_map"),
        (json.dumps({"weight_map": {"a": 1}}), "has no weight_map"),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "not a plain file name"),
        (json.dumps({"weight_map": {"a": ".."}}), ".. is damaged or cut short"),
        (json.dumps({"weight_map": {"a": ""}}), "a file without a name is damaged"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_index(folder: Path, config: ModelConfig, text: str, sentence: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert any(sentence in problem for problem in _problems(folder, config))


def test_a_folder_in_the_place_of_a_shard(folder: Path, config: ModelConfig) -> None:
    file = weight_map(folder)["head.weight"]
    (folder / file).unlink()
    (folder / file).mkdir()
    (problem,) = _problems(folder, config)
    assert problem.startswith(f"{file} is damaged") and "head.weight" in problem


def test_an_empty_folder(tmp_path: Path, config: ModelConfig) -> None:
    assert (
        "holds neither model.safetensors.index.json nor model.safetensors" in _problems(tmp_path, config)[0]
    )


def test_nan_is_refused_by_name(folder: Path, config: ModelConfig) -> None:
    """A NaN norm, an E8M0 byte 255 and an E4M3 NaN would load and make every answer NaN: all three are named."""
    _edit(folder, "norm.weight", lambda tensors: tensors["norm.weight"].fill_(float("nan")))
    _edit(folder, EXPERT_SCALE, lambda tensors: tensors[EXPERT_SCALE].view(torch.uint8)[0].fill_(255))
    dense = "layers.2.attn.wq_b.weight"
    _edit(folder, dense, lambda tensors: tensors[dense].view(torch.uint8)[3, 5:6].fill_(0xFF))
    problems = _problems(folder, config)
    assert len(problems) == 3
    assert {p.split(" ")[0] for p in problems} == {"norm.weight", "layers.5.ffn.experts.w2", dense}
