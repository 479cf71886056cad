"""Sparse latent attention against a row-by-row twin that reads records one at a time.

The reference is held to equality with rotation, attention and inverse rotation one after the other, a row that adds in fp32 to
1 % of each output vector; both, to bits that do not depend on a row's neighbours.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flashstep.kernels.attention import Attention, AttentionRows, BlockRows, reference
from flashstep.kernels.norm_rope import reference as norm_rope
from flashstep.quant import mxfp8, nvfp4
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("attention", families(Attention))


@dataclass(frozen=True)
class Shape:
    heads: int = 3
    channels: int = 32
    width: int = 5
    slots: int = 4
    lengths: tuple[int, int] = (23, 9)

    @property
    def sink(self) -> Tensor:
        return torch.linspace(-1.0, 2.0, self.heads, device=DEVICE)


TINY = Shape()
SHAPES = [
    pytest.param(TINY, id="tiny"),
    pytest.param(Shape(heads=4, channels=64, width=8, slots=16, lengths=(33, 18)), id="tiny-64"),
    *(
        pytest.param(
            Shape(heads=heads, channels=512, width=128, slots=64, lengths=(331, 90)), id=f"{heads}-heads"
        )
        for heads in (8, 16, 24, 32, 64)
    ),
]


class Records:
    """Window and compressed records of two requests in scattered blocks; everything else is a NaN pattern."""

    def __init__(self, shape: Shape = TINY) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape, channels = shape, shape.channels
        self.window, self.near, self.window_table = self._fill(mxfp8, channels, channels // 32, generator)
        self.compressed, self.far, self.table = self._fill(nvfp4, channels // 2, channels // 16, generator)

    def _fill(self, form, data_bytes: int, scale_bytes: int, generator: torch.Generator):
        slots, lengths, channels = self.shape.slots, self.shape.lengths, self.shape.channels
        blocks = [-(-n // slots) for n in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=generator)
        # a block is all its values and then all its scales, as in flashstep/cache/records.py
        raw = torch.full(
            (len(order), slots * (data_bytes + scale_bytes)), 0xFF, dtype=torch.uint8, device=DEVICE
        )
        planes = (
            raw[:, : slots * data_bytes].unflatten(1, (slots, data_bytes)),
            raw[:, slots * data_bytes :].unflatten(1, (slots, scale_bytes)),
        )
        table = torch.full((2, max(blocks)), -1)
        values = []
        for request, (n, count) in enumerate(zip(lengths, blocks, strict=True)):
            table[request, :count], order = order[:count], order[count:]
            sizes = torch.exp2(torch.randint(-3, 3, (n, channels // 16), generator=generator).float())
            x = torch.randn(n, channels, generator=generator) * sizes.repeat_interleave(16, dim=1)
            data, scale = form.quantise(x.bfloat16())
            block, place = (
                table[request][torch.arange(n) // slots].to(DEVICE),
                torch.arange(n, device=DEVICE) % slots,
            )
            planes[0][block, place] = data.view(torch.uint8).to(DEVICE)
            planes[1][block, place] = scale.view(torch.uint8).to(DEVICE)
            values.append(form.quantise_dequantise(x.bfloat16()).double().to(DEVICE))
        return planes, values, table.to(DEVICE)

    def rows(self, *, start: tuple[int, int] = (0, 0), last: int | None = None) -> AttentionRows:
        """Those from ``start`` on, of each request the ``last`` ones where that is said."""
        first = [max(s, n - (last or n)) for s, n in zip(start, self.shape.lengths, strict=True)]
        spans = list(zip(first, self.shape.lengths, strict=True))
        return AttentionRows(
            positions_T=torch.cat([torch.arange(s, n) for s, n in spans]).to(DEVICE),
            request_T=torch.cat([torch.full((n - s,), r) for r, (s, n) in enumerate(spans)]).to(DEVICE),
            window_table_RB=self.window_table,
            window_start_R=torch.tensor(start, device=DEVICE),
            block_table_RB=self.table,
        )


def turns(count: int, shape: Shape) -> dict[str, Tensor]:
    """Cosines and sines of ``count`` rows, views with a row stride of their own."""
    angle = torch.rand(count, shape.channels // 8, generator=torch.Generator().manual_seed(4)) * 6.3
    pairs = shape.channels // 16
    return {"cos_TP": angle.cos().to(DEVICE)[:, :pairs], "sin_TP": angle.sin().to(DEVICE)[:, :pairs]}


def twin(q_HC: Tensor, keys: Tensor, shape: Shape, turn: dict[str, Tensor], row: int) -> Tensor:
    """bf16 [H, C]: a softmax over ``keys`` with the sink as one more logit that carries no value, between both rotations."""
    table = turn["cos_TP"][row, None], turn["sin_TP"][row, None]
    q_HC = norm_rope.rotate(q_HC.unsqueeze(0), *table).squeeze(0)
    return norm_rope.rotate_inverse(attended(q_HC, keys, shape).unsqueeze(0), *table).squeeze(0)


def attended(q_HC: Tensor, keys: Tensor, shape: Shape) -> Tensor:
    logits = q_HC.double() @ keys.T * shape.channels**-0.5
    peak = logits.amax(1, keepdim=True)
    weights = torch.exp(logits - peak)
    total = torch.exp(torch.cat((logits, shape.sink.double().unsqueeze(1)), dim=1) - peak).sum(
        1, keepdim=True
    )
    return (weights.bfloat16().double() @ keys / total).bfloat16()


def check(attention: Attention, op: str, got: Tensor, want: Tensor, where: str) -> None:
    if attention._loaded[op] is getattr(reference, op):
        assert torch.equal(got, want), where
    else:
        error = (got.double() - want.double()).norm(dim=-1)
        assert bool((error <= 1e-2 * want.double().norm(dim=-1)).all()), f"{where}: {error.max()}"


def queries(rows: AttentionRows, shape: Shape = TINY) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    count = rows.positions_T.numel()
    return torch.randn(count, shape.heads, shape.channels, generator=generator).bfloat16().to(DEVICE)


def numbered(rows: AttentionRows) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(rows.positions_T.tolist(), rows.request_T.tolist(), strict=True)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [(0, 0), (6, 2)])
def test_attend_window_sees_exactly_the_window(
    attention: Attention, start: tuple[int, int], shape: Shape
) -> None:
    records = Records(shape)
    rows = records.rows(start=start, last=None if shape.channels < 512 else 3)
    q = queries(rows, shape)
    turn = turns(q.shape[0], shape)
    out = attention.attend_window(
        q, **turn, window=records.window, rows=rows, width=shape.width, sink_H=shape.sink
    )
    for row, (t, r) in numbered(rows):
        near = records.near[r][max(start[r], t - shape.width + 1) : t + 1]
        check(attention, "attend_window", out[row], twin(q[row], near, shape, turn, row), f"position {t}")


def selection(rows: AttentionRows, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    out = torch.full((rows.positions_T.numel(), count), -1, dtype=torch.int32)
    for row, t in enumerate(rows.positions_T.tolist()):
        chosen = torch.randperm(t + 1, generator=generator)[:count].sort().values
        out[row, : chosen.numel()] = chosen
    return out.to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
def test_attend_sparse_is_one_softmax_over_the_union(attention: Attention, shape: Shape) -> None:
    """A selected entry inside the window counts twice; -1 counts nothing; entry 0 is an entry."""
    records = Records(shape)
    large = shape.channels == 512
    rows = records.rows(last=3 if large else None)
    q, selected = queries(rows, shape), selection(rows, 201 if large else 6)
    turn = turns(q.shape[0], shape)
    out = attention.attend_sparse(
        q,
        **turn,
        window=records.window,
        compressed=records.compressed,
        rows=rows,
        selected_TK=selected,
        width=shape.width,
        sink_H=shape.sink,
    )
    for row, (t, r) in numbered(rows):
        chosen = selected[row][selected[row] >= 0].long()
        keys = torch.cat((records.near[r][max(0, t - shape.width + 1) : t + 1], records.far[r][chosen]))
        check(attention, "attend_sparse", out[row], twin(q[row], keys, shape, turn, row), f"position {t}")


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[-1]])
def test_tiling_and_company_cannot_be_seen(
    attention: Attention, monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    if attention._loaded["attend_sparse"].__module__.endswith("free_order"):
        return  # how many shares a row's keys are taken in depends on the batch, and is its purpose
    records = Records(shape)
    # on a GPU more rows than it has multiprocessors
    rows = records.rows(last=None if shape is TINY else 90 if DEVICE.type == "cuda" else 4)
    q, selected = queries(rows, shape), selection(rows)
    turn = turns(q.shape[0], shape)

    def run(part: slice) -> Tensor:
        some = AttentionRows(
            positions_T=rows.positions_T[part],
            request_T=rows.request_T[part],
            window_table_RB=rows.window_table_RB,
            window_start_R=rows.window_start_R,
            block_table_RB=rows.block_table_RB,
        )
        return attention.attend_sparse(
            q[part],
            **{name: table[part] for name, table in turn.items()},
            window=records.window,
            compressed=records.compressed,
            rows=some,
            selected_TK=selected[part],
            width=shape.width,
            sink_H=shape.sink,
        )

    whole = run(slice(None))
    assert torch.equal(whole, torch.cat([run(slice(low, low + 5)) for low in range(0, q.shape[0], 5)]))
    module = attention._loaded["attend_sparse"].__globals__
    if "WORKSPACE_BYTES" in module:
        monkeypatch.setitem(module, "WORKSPACE_BYTES", 3 * (shape.width + 6) * shape.channels * 8)
    assert torch.equal(whole, run(slice(None)))


def test_a_row_of_padding_disturbs_nobody(attention: Attention) -> None:
    """A captured graph's padding rows have no request and no position; the reference never sees them."""
    if attention._loaded["attend_sparse"] is reference.attend_sparse:
        return
    records = Records()
    rows = records.rows()
    q, selected = queries(rows), selection(rows)
    none = torch.full((2,), -1, device=DEVICE)
    padded = AttentionRows(
        positions_T=torch.cat((rows.positions_T, none)),
        request_T=torch.cat((rows.request_T, none)),
        window_table_RB=rows.window_table_RB,
        window_start_R=rows.window_start_R,
        block_table_RB=rows.block_table_RB,
    )
    planes = {"window": records.window, "compressed": records.compressed}
    common = {"width": TINY.width, "sink_H": TINY.sink, **planes}
    turn = turns(q.shape[0], TINY)
    alone = attention.attend_sparse(q, **turn, rows=rows, selected_TK=selected, **common)
    more = torch.cat((selected, selected.new_full((2, selected.shape[1]), -1)))
    turn = {name: torch.cat((table, table[:2])) for name, table in turn.items()}
    both = attention.attend_sparse(torch.cat((q, q[:2])), **turn, rows=padded, selected_TK=more, **common)
    assert torch.equal(both[:-2], alone) and not both[-2:].any()


PLACES = 3


class Blocks:
    """Draft blocks of both requests, one behind its first records and one behind all."""

    def __init__(
        self,
        *,
        position: tuple[int, int] = (23, 3),
        start: tuple[int, int] = (0, 0),
        shape: Shape = TINY,
        places: int = PLACES,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.records, self.position, self.start, self.shape = Records(shape), position, start, shape
        q = torch.randn(2, places, shape.heads, shape.channels, generator=generator)
        self.q = q.bfloat16().to(DEVICE)
        self.k = torch.randn(2, places, shape.channels, generator=generator).bfloat16().to(DEVICE)
        self.turn = turns(2 * places, shape)

    def run(self, attention: Attention, part: slice = slice(None)) -> Tensor:
        return attention.attend_block(
            self.q[part],
            self.k[part],
            **{name: table.unflatten(0, (2, -1))[part].flatten(0, 1) for name, table in self.turn.items()},
            window=self.records.window,
            rows=BlockRows(
                position_R=torch.tensor(self.position, device=DEVICE)[part],
                window_table_RB=self.records.window_table[part],
                window_start_R=torch.tensor(self.start, device=DEVICE)[part],
            ),
            width=self.shape.width,
            sink_H=self.shape.sink,
        )

    def check(self, attention: Attention) -> None:
        out, shape = self.run(attention), self.shape
        for r, n in enumerate(self.position):
            near = self.records.near[r][max(self.start[r], n - shape.width) : n]
            keys = torch.cat((near, mxfp8.quantise_dequantise(self.k[r]).double()))
            for place in range(self.q.shape[1]):
                want = twin(self.q[r, place], keys, shape, self.turn, r * self.q.shape[1] + place)
                check(attention, "attend_block", out[r, place], want, f"request {r}, place {place}")


@pytest.mark.parametrize("position", [(23, 9), (5, 4), (6, 1)])
@pytest.mark.parametrize("start", [(0, 0), (3, 0)])
def test_attend_block_sees_the_window_before_it_and_all_of_itself(
    attention: Attention, position: tuple[int, int], start: tuple[int, int]
) -> None:
    """The same ``width`` records for every place, the block's own keys as they would be stored."""
    Blocks(position=position, start=start).check(attention)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_attend_block_at_other_shapes(attention: Attention, shape: Shape) -> None:
    Blocks(position=(shape.lengths[0], 7), start=(0, 2), shape=shape, places=5).check(attention)


def test_tiling_and_company_of_blocks_cannot_be_seen(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    whole = blocks.run(attention)
    assert torch.equal(whole, torch.cat([blocks.run(attention, slice(r, r + 1)) for r in (0, 1)]))
    module = attention._loaded["attend_block"].__globals__
    if "WORKSPACE_BYTES" in module:
        monkeypatch.setitem(module, "WORKSPACE_BYTES", (TINY.width + PLACES) * TINY.channels * 8)
    assert torch.equal(whole, blocks.run(attention))
