"""Selection by property (A05), scores from records through block tables, candidates, and bounded memory (A35)."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashstep.kernels.indexer import Indexer, IndexRows
from flashstep.quant import mxfp4
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("indexer", families(Indexer))
NAN, INF = float("nan"), float("inf")
HEADS, CHANNELS, SLOTS = 4, 64, 8


# ---- top ----------------------------------------------------------------------------------------------------------


def contents(n: int) -> dict[str, Tensor]:
    """Rows of ``n`` scores that have broken top-k kernels before (A05)."""
    generator = torch.Generator().manual_seed(n)
    plain = torch.randn(n, generator=generator)
    ties = torch.randint(0, 3, (n,), generator=generator).float()
    found = {
        "plain": plain,
        "all equal": torch.full((n,), 0.5),
        "all -inf": torch.full((n,), -INF),
        "all NaN": torch.full((n,), NAN),
        "ties": ties,
        "mostly NaN": torch.where(torch.rand(n, generator=generator) < 0.9, NAN, plain),
        "denormals": plain * 1e-42,
        "zeros of both signs": torch.where(plain > 0, 0.0, -0.0),
    }
    if n:
        found["one NaN"] = plain.clone().index_fill_(0, torch.tensor([n // 2]), NAN)
        found["+inf twice"] = plain.clone().index_fill_(0, torch.tensor([0, n - 1]), INF)
    return found


def best(scores: Tensor, count: int) -> list[int]:
    """The slow twin: valid places by falling score, then rising place."""
    valid = [(-s, place) for place, s in enumerate(scores.tolist()) if not math.isnan(s) and s > -INF]
    return sorted(place for _, place in sorted(valid)[:count])


@pytest.mark.parametrize("count", [1, 6])
def test_top_selects_exactly_the_best_lowest_place_first(indexer: Indexer, count: int) -> None:
    for n in (0, 1, count - 1, count, count + 1, 5 * count, 200):
        for name, scores in contents(n).items():
            before = scores.clone()
            out = indexer.top(scores.unsqueeze(0), count=count)
            want = best(scores, count)
            assert out.dtype is torch.int32
            assert out[0].tolist() == want + [-1] * (count - len(want)), f"{name}, {n} scores"
            assert torch.equal(scores, before) or scores.isnan().any(), "the scores are the caller's"


def test_top_does_not_depend_on_neighbours(indexer: Indexer) -> None:
    rows = torch.stack(list(contents(50).values()))
    together = indexer.top(rows, count=7)
    assert all(
        torch.equal(indexer.top(row.unsqueeze(0), count=7)[0], t)
        for row, t in zip(rows, together, strict=True)
    )


# ---- select -------------------------------------------------------------------------------------------------------


def scattered(*shape: int, spread: float, generator: torch.Generator) -> Tensor:
    """Normal numbers whose groups of 32 channels differ in magnitude by about ``spread`` octaves."""
    groups = torch.randn(*shape[:-1], shape[-1] // 32, generator=generator) * spread
    return torch.randn(*shape, generator=generator) * torch.exp2(groups).repeat_interleave(32, -1)


class Keys:
    """Index keys of requests in scattered blocks; unused places hold NaN patterns."""

    def __init__(self, lengths: list[int], *, seed: int = 0, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-n // SLOTS) for n in lengths]
        order = torch.randperm(sum(blocks) + 3, generator=generator)
        raw = torch.full((len(order), SLOTS * (CHANNELS // 2 + CHANNELS // 32)), 0xFF, dtype=torch.uint8)
        border = SLOTS * CHANNELS // 2
        self.planes = (
            raw[:, :border].unflatten(1, (SLOTS, CHANNELS // 2)),
            raw[:, border:].unflatten(1, (SLOTS, CHANNELS // 32)),
        )
        self.table = torch.full((len(lengths), max(blocks)), -1)
        self.values = []
        for request, (n, count) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[request, :count] = order[:count]
            order = order[count:]
            x = scattered(n, CHANNELS, spread=spread, generator=generator)
            data, scale = mxfp4.quantise(x.bfloat16())
            block, place = self.table[request][torch.arange(n) // SLOTS], torch.arange(n) % SLOTS
            self.planes[0][block, place], self.planes[1][block, place] = data, scale
            self.values.append(mxfp4.dequantise(data, scale).double())

    def rows(self, spans: list[tuple[int, int, int]]) -> IndexRows:
        """Spans of (request, first visible, last visible): one row a number between."""
        request = torch.cat([torch.full((last - first + 1,), r) for r, first, last in spans])
        visible = torch.cat([torch.arange(first, last + 1) for _, first, last in spans])
        return IndexRows(request_T=request, visible_T=visible, block_table_RB=self.table)


def queries(rows: int, *, seed: int = 1, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = scattered(rows, HEADS, CHANNELS, spread=spread, generator=generator)
    return mxfp4.quantise_dequantise(q.bfloat16()), torch.randn(rows, HEADS, generator=generator).bfloat16()


def scores_of(q: Tensor, weight: Tensor, keys: Keys, rows: IndexRows) -> list[Tensor]:
    """fp32 scores of the visible entries of each row, in float64 and rounded once."""
    out = []
    for row, (request, visible) in enumerate(
        zip(rows.request_T.tolist(), rows.visible_T.tolist(), strict=True)
    ):
        dots = (q[row].double() @ keys.values[request][:visible].T).relu()
        scale = CHANNELS**-0.5 * HEADS**-0.5
        out.append(((weight[row].double() * scale).unsqueeze(1) * dots).sum(0).float())
    return out


def padded(places: list[int], count: int) -> list[int]:
    return places + [-1] * (count - len(places))


SPANS = [(0, 0, 60), (1, 5, 5), (2, 30, 41)]


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("spread", [0.0, 2.0, 9.0])
def test_select_takes_the_best_visible_entries(indexer: Indexer, count: int, spread: float) -> None:
    """Several requests in one call, from nothing visible on; wide spreads leave fp32 and take the float64 path."""
    keys = Keys([60, 7, 44], spread=spread)
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel(), spread=spread)
    out = indexer.select(q, weight, keys=keys.planes, rows=rows, count=count)
    for got, scores in zip(out.tolist(), scores_of(q, weight, keys, rows), strict=True):
        assert got == padded(best(scores, count), count)


def test_select_within_takes_only_candidates(indexer: Indexer) -> None:
    keys = Keys([60, 7, 44])
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel())
    generator = torch.Generator().manual_seed(5)
    candidates = torch.full((rows.request_T.numel(), 3), -1, dtype=torch.int32)
    for row, visible in enumerate(rows.visible_T.tolist()):
        blocks = torch.randperm(-(-visible // 4), generator=generator)[:3].sort().values
        candidates[row, : blocks.numel()] = blocks
    out = indexer.select_within(
        q, weight, keys=keys.planes, rows=rows, count=5, candidates_TM=candidates, block_size=4
    )
    for got, scores, blocks in zip(
        out.tolist(), scores_of(q, weight, keys, rows), candidates.tolist(), strict=True
    ):
        inside = torch.tensor([place // 4 in blocks for place in range(scores.numel())], dtype=torch.bool)
        assert got == padded(best(scores.masked_fill(~inside, -INF), 5), 5)


@pytest.mark.parametrize("blocks", [3, 5, 40])
def test_select_with_candidates_keeps_the_best_blocks_and_the_newest(indexer: Indexer, blocks: int) -> None:
    keys = Keys([60, 7, 44])
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel())
    chosen, candidates = indexer.select_with_candidates(
        q, weight, keys=keys.planes, rows=rows, count=5, blocks=blocks, block_size=4
    )
    for got, kept, scores in zip(
        chosen.tolist(), candidates.tolist(), scores_of(q, weight, keys, rows), strict=True
    ):
        assert got == padded(best(scores, 5), 5), "its own selection is not restricted"
        peaks = torch.tensor([part.max() for part in scores.split(4)]) if scores.numel() else torch.zeros(0)
        if peaks.numel():
            peaks[-1] = INF
        assert kept == padded(best(peaks, blocks), blocks)


def test_select_is_the_same_for_any_tiling_and_company(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys([300, 123])
    rows = keys.rows([(0, 260, 300), (1, 100, 123)])
    q, weight = queries(rows.request_T.numel())

    def run(part: slice) -> tuple[Tensor, ...]:
        some = IndexRows(
            request_T=rows.request_T[part], visible_T=rows.visible_T[part], block_table_RB=rows.block_table_RB
        )
        args = {"keys": keys.planes, "rows": some, "count": 9}
        chosen, candidates = indexer.select_with_candidates(
            q[part], weight[part], **args, blocks=6, block_size=8
        )
        within = indexer.select_within(q[part], weight[part], **args, candidates_TM=candidates, block_size=8)
        return chosen, candidates, within

    whole = run(slice(None))
    pieces = [run(slice(low, low + 7)) for low in range(0, rows.request_T.numel(), 7)]
    assert all(torch.equal(w, torch.cat(p)) for w, p in zip(whole, zip(*pieces, strict=True), strict=True))
    module = indexer._loaded["select"].__globals__
    for name, size in (("KEY_TILE", 24), ("COLUMNS", 5), ("DOT_BYTES", 2000), ("GATHER_BYTES", 50_000)):
        if name in module:
            monkeypatch.setitem(module, name, size)
    assert all(torch.equal(w, t) for w, t in zip(whole, run(slice(None)), strict=True))


def test_select_survives_garbage_keys(indexer: Indexer) -> None:
    """A05: NaN keys are never selected while a number is left, and every index is in range."""
    keys = Keys([60])
    keys.planes[1][keys.table[0, :3]] = 0xFF
    rows = keys.rows([(0, 60, 60)])
    q, weight = queries(1)
    out = indexer.select(q, weight, keys=keys.planes, rows=rows, count=40)[0]
    assert (out[:36] >= 24).all() and out[:36].unique().numel() == 36 and (out[36:] == -1).all()


def test_select_sees_small_groups_beside_large_ones(indexer: Indexer) -> None:
    """A large group cancels to nothing and a small one decides: fp32 sums would lose it, and must not be used here."""
    keys = Keys([20])
    small = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(5)
    x = torch.zeros(20, CHANNELS)
    x[:, 0], x[:, 1], x[:, 33], x[:, 34] = 6.0, small, 2.0**26, -(2.0**26)
    block, place = keys.table[0][torch.arange(20) // SLOTS], torch.arange(20) % SLOTS
    keys.planes[0][block, place], keys.planes[1][block, place] = mxfp4.quantise(x)
    q = torch.zeros(1, HEADS, CHANNELS)
    q[:, :, [1, 33, 34]] = 1.0
    out = indexer.select(
        q.bfloat16(),
        torch.ones(1, HEADS).bfloat16(),
        keys=keys.planes,
        rows=keys.rows([(0, 20, 20)]),
        count=5,
    )
    assert out[0].tolist() == [3, 7, 11, 15, 19]


class Peak(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def test_select_memory_does_not_grow_with_rows_times_entries(indexer: Indexer) -> None:
    """A35: what is alive at once is bounded, whatever the batch and the length."""
    keys = Keys([90_000], spread=0.0)
    peaks = []
    for rows, visible in ((64, 40_000), (64, 90_000), (256, 40_000)):
        q, weight = queries(rows, spread=0.0)
        with Peak() as peak:
            indexer.select_with_candidates(
                q,
                weight,
                keys=keys.planes,
                rows=keys.rows([(0, visible - rows + 1, visible)]),
                count=32,
                blocks=64,
                block_size=8,
            )
        peaks.append(peak.bytes)
    whole = 256 * 40_000 * 4  # one fp32 score matrix
    assert max(peaks) == min(peaks) < whole / 3
