"""``bench chain`` on the CPU: the chain is the references' composition, and each layer feeds the next."""

import pytest
import torch

from flashstep.bench.chain import SHAPES, Shape, measure, router_chain
from flashstep.kernels import choose_ops

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [Shape(16, 2, 64, 3), Shape(12, 3, 32, 4, "sqrt_softplus")], ids=str)
def test_the_chain_is_what_it_says(shape: Shape) -> None:
    work, inputs = router_chain(shape, tokens=5, ops=choose_ops(CPU), device=CPU)
    for written in inputs[1:]:
        written.fill_(float("nan"))
    work()
    generator = torch.Generator().manual_seed(1)
    gates = [
        (torch.randn(shape.experts, shape.hidden, generator=generator) * shape.hidden**-0.5).bfloat16()
        for _ in range(shape.layers)
    ]
    bias_E = torch.randn(shape.experts, generator=generator) * 0.01
    x_TD = first_TD = torch.randn(5, shape.hidden, generator=generator).bfloat16()
    for gate, out in zip(gates, inputs[1:], strict=True):
        logits = x_TD.double() @ gate.double().T
        scores = (
            logits.softmax(1) if shape.scoring == "softmax" else torch.nn.functional.softplus(logits).sqrt()
        )
        chosen = (scores.float() + bias_E).topk(shape.chosen, dim=1).indices.sort(dim=1).values
        weights = scores.gather(1, chosen)
        x_TD = (first_TD.float() * (weights / weights.sum(1, keepdim=True))[:, :1].float()).bfloat16()
        assert torch.equal(out, x_TD)


def test_every_chain_is_replayed() -> None:
    measured = list(measure([Shape(16, 2, 64, 3), Shape(8, 1, 32, 2)], (1, 4), replays=5, device="cpu"))
    assert [item.name for item in measured] == [
        "16/2/64/3/softmax x 1", "16/2/64/3/softmax x 4", "8/1/32/2/softmax x 1", "8/1/32/2/softmax x 4",
    ]  # fmt: skip
    assert all(len(item.us) == 5 and item.median_us > 0 and item.kernels is None for item in measured)


def test_the_shapes_of_the_specification() -> None:
    """E1's, at its tokens, and V4.1's two."""
    assert [shape[:4] for shape in SHAPES[:3]] == [(512, 10, 2560, 48), (128, 8, 2048, 48), (64, 8, 2048, 16)]
    assert [shape[:2] for shape in SHAPES[3:]] == [(384, 6), (128, 3)]
    assert [Shape.parse(shape.name) for shape in SHAPES] == list(SHAPES)


@pytest.mark.parametrize(
    "text", ["384/6/5120", "384/6/5120/x", "384/6/5120/0", "4/6/64/2", "8/2/64/2/relu", ""]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"written EXPERTS|chooses 6 of 4|scores by 'relu'"):
        Shape.parse(text)
