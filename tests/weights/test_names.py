"""The tensor inventory against spec/model.md 11 and the golden checkpoints."""

import math

import msgspec

from flashstep.config.presets import released
from flashstep.weights.names import Kind, is_vision, parameters, stored_tensors

VISION_TENSORS = 266  # of the 96,085: not listed, recognised by name
VISION_BF16 = {  # of them, counted from the shapes of spec/model.md 11
    "images": 3 * 5120,
    "patch": 1024 * 588 + 1024,
    "blocks": 32 * (2 * 1024 + 3072 * 1024 + 3072 + 1024 * 1024 + 1024 + 5632 * 1024 + 1024 * 2816),
    "norm": 1024,
    "aligner": 5120 * 9216 + 5120 + 5120 * 5120 + 5120,
}


def test_released_totals() -> None:
    stored = stored_tensors(released()).values()
    assert len(stored) + VISION_TENSORS == 96_085
    totals = dict.fromkeys(("F32", "BF16", "F8_E4M3", "I8", "F8_E8M0"), 0)
    for tensor in stored:
        totals[tensor.dtype] += math.prod(tensor.shape)
    totals["BF16"] += sum(VISION_BF16.values())
    assert totals["F32"] == 42_307_282
    assert totals["BF16"] == 1_976_441_856
    assert totals["F8_E4M3"] == 204_015_223_296
    assert 2 * totals["I8"] == 557_171_343_360
    size = 4 * totals["F32"] + 2 * totals["BF16"] + totals["F8_E4M3"] + totals["I8"] + totals["F8_E8M0"]
    assert size == 510_286_023_000


def test_every_stored_tensor_feeds_one_parameter_and_back() -> None:
    ours = parameters(released())
    names = [stored.name for parameter in ours.values() for stored in parameter.stored]
    assert len(names) == len(set(names))
    assert ours["layers.3.ffn.experts.w2"].stored[-1].name == "layers.3.ffn.experts.383.w2.scale"
    assert ours["layers.3.ffn.experts.w2"].shape == (384, 5120, 2304)
    table = ours["layers.14.engram.embed.weight"]
    assert table.kind is Kind.ENGRAM_TABLE
    assert [s.shape for s in table.stored] == [(384_016_682, 256), (384_016_682, 8)]
    assert sum(p.is_draft for p in ours.values()) == 3 * 25 + 6


def test_a_model_without_drafter_has_no_draft_tensors() -> None:
    config = released()
    plain = msgspec.structs.replace(
        config, num_nextn_predict_layers=0, compress_ratios=config.compress_ratios[:40]
    )
    assert not any(p.is_draft for p in parameters(plain).values())


def test_vision_names() -> None:
    for name in ("vision.norm.weight", "aligner.w1.bias", "image_start", "image_newline"):
        assert is_vision(name)
    for name in ("visionary.weight", "image_startle", "layers.0.vision.weight"):
        assert not is_vision(name)
