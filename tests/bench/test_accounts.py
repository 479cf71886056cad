"""Every linear layer of the released model, whole or as a rank, belongs to a part that has a floor."""

import pytest

from flashstep.bench import accounts, floors
from flashstep.bench.accounts import part_of
from flashstep.bench.forward import FLOOR_NAMES
from flashstep.config.presets import released
from flashstep.parallel.layout import WHOLE, Layout
from flashstep.weights.names import Kind, parameters

KNOWN = {
    FLOOR_NAMES.get(part.name, part.name)
    for part in floors.of_step(released(), WHOLE, requests=1, rows=6, context=9999, drafts=True)
}


@pytest.mark.parametrize("text", ["tp4:0", "dep8:3", "dep32:0", "tp8:1"])
def test_every_linear_layer_has_a_part_with_a_floor(text: str) -> None:
    layout = Layout.parse(text)
    view = layout.view(released())
    joined = {"wq_a": "wkv", "w1": "w3", "compressor.wkv": "wgate"}
    for name, parameter in parameters(view, layout).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        if (
            len(parameter.shape) != 2
            or "embed" in name
            or "_fn" in name
            or "gate.weight" in name
            or "engram.q" in name
            or "engram.k" in name
            or stem == "w3"
        ):
            continue
        outputs, inputs = parameter.shape
        op = "gemm.lin8" if parameter.kind is Kind.FP8_BLOCK else "gemm.linf"
        phase = accounts.DRAFT if parameter.is_draft else accounts.TARGET
        if stem in joined and (stem == "w1" or phase == accounts.TARGET) and "wkv" not in stem:
            outputs = outputs + (view.head_dim if stem == "wq_a" else outputs)
        part = part_of(f"{phase}/{op}[{outputs}x{inputs}]", view)
        assert part in KNOWN, (name, part)
        assert part.startswith(("draft", "Markov")) == parameter.is_draft or stem == "wkv", (name, part)


def test_ops_without_weights_go_by_their_family() -> None:
    model = released()
    assert part_of("target/attention.attend_sparse", model) == accounts.SPARSE
    assert part_of("draft/attention.attend_block", model) == accounts.DRAFT_REST
    assert part_of("target/moe.experts", model) == accounts.ROUTED
    assert part_of("draft/moe.experts", model) == accounts.DRAFT_ROUTED
    assert part_of("target/norm_rope.rms", model) == accounts.CASTS
    assert part_of("target", model) == accounts.GLUE == part_of("", model)
    assert part_of("sample", model) == accounts.SAMPLING
