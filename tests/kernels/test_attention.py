"""Sparse latent attention against a row-by-row twin that reads records one at a time."""

import pytest
import torch
from torch import Tensor

from flashstep.kernels.attention import Attention, AttentionRows, BlockRows
from flashstep.quant import mxfp8, nvfp4
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("attention", families(Attention))
HEADS, CHANNELS, WIDTH, SLOTS = 3, 32, 5, 4
LENGTHS = (23, 9)
SINK = torch.tensor([0.3, -1.0, 2.0])


class Records:
    """Window and compressed records of two requests in scattered blocks; everything else is a NaN pattern."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.window, self.near, self.window_table = self._fill(mxfp8, CHANNELS, CHANNELS // 32, generator)
        self.compressed, self.far, self.table = self._fill(nvfp4, CHANNELS // 2, CHANNELS // 16, generator)

    @staticmethod
    def _fill(form, data_bytes: int, scale_bytes: int, generator: torch.Generator):
        blocks = [-(-n // SLOTS) for n in LENGTHS]
        order = torch.randperm(sum(blocks) + 2, generator=generator)
        planes = (
            torch.full((len(order), SLOTS, data_bytes), 0xFF, dtype=torch.uint8),
            torch.full((len(order), SLOTS, scale_bytes), 0xFF, dtype=torch.uint8),
        )
        table = torch.full((2, max(blocks)), -1)
        values = []
        for request, (n, count) in enumerate(zip(LENGTHS, blocks, strict=True)):
            table[request, :count], order = order[:count], order[count:]
            x = torch.randn(n, CHANNELS, generator=generator).bfloat16()
            data, scale = form.quantise(x)
            block, place = table[request][torch.arange(n) // SLOTS], torch.arange(n) % SLOTS
            planes[0][block, place], planes[1][block, place] = data.view(torch.uint8), scale.view(torch.uint8)
            values.append(form.quantise_dequantise(x).double())
        return planes, values, table

    def rows(self, *, start: tuple[int, int] = (0, 0)) -> AttentionRows:
        return AttentionRows(
            positions_T=torch.cat([torch.arange(s, n) for s, n in zip(start, LENGTHS, strict=True)]),
            request_T=torch.cat(
                [torch.full((n - s,), r) for r, (s, n) in enumerate(zip(start, LENGTHS, strict=True))]
            ),
            window_table_RB=self.window_table,
            window_start_R=torch.tensor(start),
            block_table_RB=self.table,
        )


def twin(q_HC: Tensor, keys: Tensor) -> Tensor:
    """bf16 [H, C]: a softmax over ``keys`` with the sink as one more logit that carries no value."""
    logits = q_HC.double() @ keys.T * CHANNELS**-0.5
    peak = logits.amax(1, keepdim=True)
    weights = torch.exp(logits - peak)
    total = torch.exp(torch.cat((logits, SINK.double().unsqueeze(1)), dim=1) - peak).sum(1, keepdim=True)
    return (weights.bfloat16().double() @ keys / total).bfloat16()


def queries(rows: AttentionRows) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows.positions_T.numel(), HEADS, CHANNELS, generator=generator).bfloat16()


@pytest.mark.parametrize("start", [(0, 0), (6, 2)])
def test_attend_window_sees_exactly_the_window(attention: Attention, start: tuple[int, int]) -> None:
    records = Records()
    rows = records.rows(start=start)
    q = queries(rows)
    out = attention.attend_window(q, window=records.window, rows=rows, width=WIDTH, sink_H=SINK)
    for row, (t, r) in enumerate(zip(rows.positions_T.tolist(), rows.request_T.tolist(), strict=True)):
        near = records.near[r][max(start[r], t - WIDTH + 1) : t + 1]
        assert torch.equal(out[row], twin(q[row], near)), f"position {t}"


def selection(rows: AttentionRows, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    out = torch.full((rows.positions_T.numel(), count), -1, dtype=torch.int32)
    for row, t in enumerate(rows.positions_T.tolist()):
        chosen = torch.randperm(t + 1, generator=generator)[:count].sort().values
        out[row, : chosen.numel()] = chosen
    return out


def test_attend_sparse_is_one_softmax_over_the_union(attention: Attention) -> None:
    """A selected entry inside the window counts twice; -1 counts nothing; entry 0 is an entry."""
    records = Records()
    rows = records.rows()
    q, selected = queries(rows), selection(rows)
    out = attention.attend_sparse(
        q,
        window=records.window,
        compressed=records.compressed,
        rows=rows,
        selected_TK=selected,
        width=WIDTH,
        sink_H=SINK,
    )
    for row, (t, r) in enumerate(zip(rows.positions_T.tolist(), rows.request_T.tolist(), strict=True)):
        chosen = selected[row][selected[row] >= 0].long()
        keys = torch.cat((records.near[r][max(0, t - WIDTH + 1) : t + 1], records.far[r][chosen]))
        assert torch.equal(out[row], twin(q[row], keys)), f"position {t}"


def test_tiling_and_company_cannot_be_seen(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records()
    rows = records.rows()
    q, selected = queries(rows), selection(rows)

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
            window=records.window,
            compressed=records.compressed,
            rows=some,
            selected_TK=selected[part],
            width=WIDTH,
            sink_H=SINK,
        )

    whole = run(slice(None))
    assert torch.equal(whole, torch.cat([run(slice(low, low + 5)) for low in range(0, q.shape[0], 5)]))
    module = attention._loaded["attend_sparse"].__globals__
    if "WORKSPACE_BYTES" in module:
        monkeypatch.setitem(module, "WORKSPACE_BYTES", 3 * (WIDTH + 6) * CHANNELS * 8)
    assert torch.equal(whole, run(slice(None)))


PLACES = 3


class Blocks:
    """Draft blocks of both requests, one behind its first records and one behind all."""

    def __init__(self, *, position: tuple[int, int] = (23, 3), start: tuple[int, int] = (0, 0)) -> None:
        generator = torch.Generator().manual_seed(3)
        self.records, self.position, self.start = Records(), position, start
        self.q = torch.randn(2, PLACES, HEADS, CHANNELS, generator=generator).bfloat16()
        self.k = torch.randn(2, PLACES, CHANNELS, generator=generator).bfloat16()

    def run(self, attention: Attention, part: slice = slice(None)) -> Tensor:
        return attention.attend_block(
            self.q[part],
            self.k[part],
            window=self.records.window,
            rows=BlockRows(
                position_R=torch.tensor(self.position)[part],
                window_table_RB=self.records.window_table[part],
                window_start_R=torch.tensor(self.start)[part],
            ),
            width=WIDTH,
            sink_H=SINK,
        )


@pytest.mark.parametrize("position", [(23, 9), (5, 4), (6, 1)])
@pytest.mark.parametrize("start", [(0, 0), (3, 0)])
def test_attend_block_sees_the_window_before_it_and_all_of_itself(
    attention: Attention, position: tuple[int, int], start: tuple[int, int]
) -> None:
    """The same ``WIDTH`` records for every place, the block's own keys as they would be stored."""
    blocks = Blocks(position=position, start=start)
    out = blocks.run(attention)
    for r, n in enumerate(position):
        near = blocks.records.near[r][max(start[r], n - WIDTH) : n]
        keys = torch.cat((near, mxfp8.quantise_dequantise(blocks.k[r]).double()))
        for place in range(PLACES):
            assert torch.equal(out[r, place], twin(blocks.q[r, place], keys)), f"request {r}, place {place}"


def test_tiling_and_company_of_blocks_cannot_be_seen(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    whole = blocks.run(attention)
    assert torch.equal(whole, torch.cat([blocks.run(attention, slice(r, r + 1)) for r in (0, 1)]))
    module = attention._loaded["attend_block"].__globals__
    if "WORKSPACE_BYTES" in module:
        monkeypatch.setitem(module, "WORKSPACE_BYTES", (WIDTH + PLACES) * CHANNELS * 8)
    assert torch.equal(whole, blocks.run(attention))
