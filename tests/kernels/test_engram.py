"""Engram: rows hashed and decoded exactly; gate goldens through the op, statistics per stream, all streams get the value."""

import pytest
import torch

from flashstep.kernels.engram import Engram, Hashing, reference
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("engram", families(Engram))
STREAMS, WIDTH = 4, 64


def check(engram: Engram, got: torch.Tensor, want: torch.Tensor) -> None:
    """The reference is held to equality, a row that adds in fp32 to one step of bf16."""
    assert got.dtype is want.dtype
    if engram._loaded["inject"] is reference.inject:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-5)


def inputs(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, STREAMS, width), (rows, (STREAMS + 1) * width), (STREAMS, width), (STREAMS, width))
    return tuple(torch.randn(*shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes)


PRIMES = ((101, 103), (107, 109), (113, 127))
MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)


def table(width: int, *, apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte but E4M3's NaN, and every scale; in two planes, or row by row."""
    rows = sum(sum(pair) for pair in PRIMES)
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 256, (rows, width), generator=generator, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x38
    scales = torch.randint(0, 256, (rows, width // 32), generator=generator, dtype=torch.uint8)
    if apart:
        return values.to(DEVICE), scales.to(DEVICE)
    joined = torch.cat((values, scales), 1).to(DEVICE)
    return joined[:, :width], joined[:, width:]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("width", [32, 256])
def test_look_up_hashes_and_decodes(engram: Engram, apart: bool, width: int) -> None:
    """Bucket, row and number said in Python; scale 255 is NaN, scale 0 a subnormal."""
    flat = [prime for pair in PRIMES for prime in pair]
    offsets = [sum(flat[:column]) for column in range(len(flat))]
    hashing = Hashing(*(torch.tensor(numbers, device=DEVICE) for numbers in (MULTIPLIERS, flat, offsets)))
    values, scales = table(width, apart=apart)
    lookback = torch.randint(0, 99_092, (50, 4), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    got = engram.look_up(lookback, hashing, (values, scales)).unflatten(1, (len(flat), width))
    data = values.cpu().view(torch.float8_e4m3fn).double()
    for token, ids in enumerate(lookback.tolist()):
        mixed = ids[0] * MULTIPLIERS[0]
        for n, pair in enumerate(PRIMES, start=1):
            mixed ^= ids[n] * MULTIPLIERS[n]
            for head, prime in enumerate(pair):
                column = 2 * (n - 1) + head
                row = mixed % prime + offsets[column]
                scale = torch.exp2(scales[row].cpu().double() - 127)
                scale[scales[row].cpu() == 255] = float("nan")
                want = (data[row] * scale.repeat_interleave(32)).bfloat16()
                assert torch.equal(got[token, column].cpu().nan_to_num(7.0), want.nan_to_num(7.0))
    assert engram.look_up(lookback[:0], hashing, (values, scales)).shape == (0, len(flat) * width)


@pytest.mark.parametrize(("dot", "gate"), [(0.0, 0.50025), (-4.0, 0.11920), (0.25, 0.62246)])
def test_inject_reproduces_the_golden_gates(engram: Engram, dot: float, gate: float) -> None:
    """Streams and keys of unit magnitude: the product is sqrt(width) * weight, whatever the streams' scales."""
    x = torch.tensor([1.0, 2.0, 0.5, 4.0], device=DEVICE).view(1, 4, 1).expand(1, STREAMS, WIDTH)
    key = torch.ones(1, STREAMS * WIDTH, device=DEVICE).bfloat16()
    value = torch.full((1, WIDTH), 256.0, device=DEVICE).bfloat16()
    weight = torch.full((STREAMS, WIDTH), dot / WIDTH**0.5, device=DEVICE).bfloat16()
    out = engram.inject(
        x.bfloat16().contiguous(),
        torch.cat((key, value), dim=1),
        query_weight_SD=weight,
        key_weight_SD=torch.ones_like(weight),
        eps=1e-20,
    )
    added = out.float() - x
    torch.testing.assert_close(added / 256, torch.full_like(added, gate), rtol=4e-3, atol=2e-3)


def test_inject_equals_the_formula(engram: Engram) -> None:
    x, kv, qw, kw = inputs(9, WIDTH)
    out = engram.inject(x, kv, query_weight_SD=qw, key_weight_SD=kw, eps=1e-20)
    for stream in range(STREAMS):
        xs, ks = x[:, stream].double(), kv[:, stream * WIDTH : (stream + 1) * WIDTH].double()
        dot = (
            (xs * qw[stream].double() * kw[stream].double() * ks).sum(1)
            * WIDTH**0.5
            / (xs.norm(dim=1) * ks.norm(dim=1))
        )
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).unsqueeze(1)
        check(engram, out[:, stream], (xs + gate * kv[:, STREAMS * WIDTH :].double()).bfloat16())


@pytest.mark.parametrize(("rows", "width"), [(3, 5120), (5, 96), (0, 64)])
def test_inject_equals_the_reference_at_other_shapes(engram: Engram, rows: int, width: int) -> None:
    x, kv, query_weight, key_weight = inputs(rows, width)
    weights: dict = {"query_weight_SD": query_weight, "key_weight_SD": key_weight, "eps": 1e-20}
    out = engram.inject(x, kv, **weights)
    check(engram, out, reference.inject(x, kv, **weights))
    assert all(
        torch.equal(engram.inject(x[t : t + 1], kv[t : t + 1], **weights)[0], out[t]) for t in range(rows)
    )
