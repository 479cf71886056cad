"""``bench pdl``: what is counted is what was launched, and both arms of the router chain compute the same right thing."""

import pytest
import torch

from flashstep.bench import pdl
from flashstep.bench.chain import SHAPES, Shape, router_chain
from flashstep.bench.graph import CapturedGraph
from flashstep.kernels import choose_ops
from flashstep.kernels.jit import programmatic, without_programmatic_launches

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_differences_are_paired_by_round() -> None:
    assert pdl.paired_difference([1.0, 5.0, 3.0], [2.0, 6.5, 3.5]) == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a CUDA device")
def test_a_machine_without_a_cuda_device_is_told_so() -> None:
    with pytest.raises(ValueError, match="this machine has none"):
        next(pdl.measure())


def test_a_cpu_never_launches_programmatically() -> None:
    assert not programmatic(torch.device("cpu"))


@pytest.mark.gpu
@gpu
def test_programmatic_edges_are_counted_per_way_of_launching() -> None:
    counted = {item.arm: item.facts for item in pdl._pairs(rounds=1) if item.facts is not None}
    edges = {arm: facts.programmatic for arm, facts in counted.items()}
    assert edges == {
        "triple chevron": 0,
        "extensible launch": 0,
        "extensible launch + attribute": pdl.PAIRS,
        "attribute on the first consumer only": 1,
        "attribute, producer triggers early": 2 * pdl.PAIRS - 1,  # the first kernel has no predecessor
    }
    assert {facts.kernels for facts in counted.values()} == {2 * pdl.PAIRS}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.layers >= 40], ids=str)
def test_the_router_chain_is_the_plain_forms_with_either_launch(shape: Shape) -> None:
    experts, count, hidden, layers, scoring = shape
    here = torch.device("cuda", torch.cuda.current_device())
    work, inputs = router_chain(shape, tokens=16, ops=choose_ops(here), device=here)
    results = []
    with without_programmatic_launches():
        plain = CapturedGraph(work)
    for graph in (plain, CapturedGraph(work)):
        for written in inputs[1:]:
            written.fill_(float("nan"))
        graph.replay()
        results.append([x.clone() for x in inputs[1:]])
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*results, strict=True))
    reference = choose_ops(inputs[0].device, kernels="reference").moe
    device = inputs[0].device
    generator = torch.Generator(device).manual_seed(1)
    gate = (torch.randn(experts, hidden, device=device, generator=generator) * hidden**-0.5).bfloat16()
    for _ in range(layers - 1):  # draws between the first gate and the bias
        torch.randn(experts, hidden, device=device, generator=generator)
    bias_E = torch.randn(experts, device=device, generator=generator) * 0.01
    _, weights_TK = reference.route(
        inputs[0],
        reference.prepare_gate(gate),
        bias_E=bias_E,
        count=count,
        scale=1.0,
        temperature=1.0,
        scoring=scoring,
    )
    wanted = inputs[0].float() * weights_TK[:, :1]
    assert (results[0][0].float() - wanted).norm() < 4e-3 * wanted.norm()
