"""mHC ops: golden Sinkhorn, orientation of the mix, one statistic over all streams, nothing rounded early."""

import pytest
import torch

from flashstep.kernels.mhc import Mhc
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("mhc", families(Mhc))
STREAMS, WIDTH, ROWS = 4, 32, 11
LOGITS = torch.tensor([[0.5, -1, 2, 0], [1, 0.25, -0.75, 0.5], [-0.5, 1.5, 0, 1], [0, 0, 0, 0]])
BALANCED = torch.tensor(
    [
        [0.194238, 0.040232, 0.647623, 0.117906],
        [0.459817, 0.201621, 0.059446, 0.279115],
        [0.073688, 0.505421, 0.090384, 0.330506],
        [0.272256, 0.252725, 0.202546, 0.272472],
    ]
)


def streams(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, STREAMS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()


def coefficients(mhc: Mhc, x: torch.Tensor, *, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor):
    site = mhc.prepare_site(fn, base_M=base, scale_3=scale, streams=STREAMS)
    return mhc.coefficients(x, site, iterations=20, eps=1e-6, norm_eps=1e-20)


def test_coefficients_reproduce_the_golden_sinkhorn(mhc: Mhc) -> None:
    """With a zero projection the base alone decides: sigmoid(0) twice, and the golden mix of spec/model.md 13."""
    base = torch.cat((torch.zeros(8), LOGITS.flatten()))
    pre, post, comb = coefficients(
        mhc, streams(), fn=torch.zeros(24, STREAMS * WIDTH), base=base, scale=torch.ones(3)
    )
    assert torch.equal(pre, torch.full((ROWS, 4), 0.5 + 1e-6)) and torch.equal(post, torch.ones(ROWS, 4))
    torch.testing.assert_close(comb, BALANCED.expand(ROWS, 4, 4), rtol=0, atol=1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones(ROWS, 4), rtol=0, atol=1e-5)  # columns last


def test_prepare_site_and_scale_take_their_places(mhc: Mhc) -> None:
    x = streams()
    fn = torch.randn(24, STREAMS * WIDTH, generator=torch.Generator().manual_seed(1)) * 0.1
    scale = torch.tensor([0.5, 1.5, 0.0])
    pre, post, comb = coefficients(mhc, x, fn=fn, base=torch.zeros(24), scale=scale)
    z = x.flatten(1).double()
    mixed = (z @ fn.double().T) / z.square().mean(1, keepdim=True).sqrt()
    assert torch.equal(pre, (torch.sigmoid(mixed[:, :4] * 0.5) + 1e-6).float())
    assert torch.equal(post, (2 * torch.sigmoid(mixed[:, 4:8] * 1.5)).float())
    torch.testing.assert_close(comb, torch.full_like(comb, 0.25), rtol=0, atol=1e-6)


def test_collapse_reads_one_stream_when_told(mhc: Mhc) -> None:
    x, pre = streams(), torch.zeros(ROWS, STREAMS)
    pre[:, 2] = 1
    assert torch.equal(mhc.collapse(x, pre), x[:, 2])


def test_write_sums_over_input_streams(mhc: Mhc) -> None:
    """comb[i, j] carries i to j: a permutation moves whole streams, and the transpose would not."""
    x, y = streams(), streams()[:, 1]
    comb = torch.zeros(ROWS, STREAMS, STREAMS)
    for source, target in enumerate((2, 0, 3, 1)):
        comb[:, source, target] = 1
    post = torch.tensor([0.0, 1.0, 0.0, 2.0]).expand(ROWS, STREAMS)
    out = mhc.write(y, x, post_TS=post, comb_TSS=comb)
    assert torch.equal(out[:, 0], x[:, 1]) and torch.equal(out[:, 2], x[:, 0])
    assert torch.equal(out[:, 1], (x[:, 3].double() + y.double()).bfloat16())
    assert torch.equal(out[:, 3], (x[:, 2].double() + 2 * y.double()).bfloat16())


def test_rows_do_not_see_their_neighbours(mhc: Mhc) -> None:
    fn, base = torch.randn(24, STREAMS * WIDTH) * 0.1, torch.randn(24)
    together = coefficients(mhc, streams(), fn=fn, base=base, scale=torch.ones(3))
    alone = coefficients(mhc, streams()[3:5], fn=fn, base=base, scale=torch.ones(3))
    assert all(torch.equal(a, t[3:5]) for a, t in zip(alone, together, strict=True))
