"""Selection by property (A05), scores from records through block tables, candidates, and bounded memory (A35).

``top`` is exact everywhere. What is selected by scores that were added in fp32 may differ from the slow twin's choice only
among entries whose scores are as good as equal; the reference may not differ at all.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashstep.kernels.indexer import Indexer, IndexRows, reference
from flashstep.quant import mxfp4
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("indexer", families(Indexer))
NAN, INF = float("nan"), float("inf")
HEADS, CHANNELS, SLOTS = 4, 64, 8  # the tiny model's index heads and channels, and entries of a cache block
SHAPES = pytest.mark.parametrize(
    "heads,channels,members", [(HEADS, CHANNELS, 4), (32, 128, 8)], ids=["tiny", "released"]
)  # and how many entries a candidate block has


def adds_in_float64(indexer: Indexer) -> bool:
    return indexer._loaded["select"] is reference.select


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
            out = indexer.top(scores.unsqueeze(0).to(DEVICE), count=count)
            want = best(scores, count)
            assert out.dtype is torch.int32
            assert out[0].tolist() == want + [-1] * (count - len(want)), f"{name}, {n} scores"
            assert torch.equal(scores, before) or scores.isnan().any(), "the scores are the caller's"


def test_top_of_long_rows(indexer: Indexer) -> None:
    """Longer than any part of a row that an implementation looks at alone, with ties across the parts."""
    for count, n in ((16, 9_000), (300, 5_000), (600, 70_001), (2_048, 40_000)):
        rows = torch.stack([contents(n)[name] for name in ("plain", "ties", "mostly NaN", "all equal")])
        rows[0, -(n // 8) :] += 3.0  # the best lie together
        out = indexer.top(rows.to(DEVICE), count=count)
        for got, scores in zip(out.tolist(), rows, strict=True):
            want = best(scores, count)
            assert got == padded(want, count)


def test_top_does_not_depend_on_neighbours(indexer: Indexer) -> None:
    rows = torch.stack(list(contents(50).values())).to(DEVICE)
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

    def __init__(
        self, lengths: list[int], *, spread: float = 2.0, channels: int = CHANNELS, slots: int = SLOTS
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        blocks = [-(-n // slots) for n in lengths]
        order = torch.randperm(sum(blocks) + 3, generator=generator)
        raw = torch.full((len(order), slots * (channels // 2 + channels // 32)), 0xFF, dtype=torch.uint8)
        raw = raw.to(DEVICE)
        border = slots * channels // 2
        self.planes = (
            raw[:, :border].unflatten(1, (slots, channels // 2)),
            raw[:, border:].unflatten(1, (slots, channels // 32)),
        )
        self.table = torch.full((len(lengths), max(blocks)), -1)
        self.values = []
        for request, (n, count) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[request, :count] = order[:count]
            order = order[count:]
            x = scattered(n, channels, spread=spread, generator=generator)
            data, scale = mxfp4.quantise(x.bfloat16())
            block, place = self.table[request][torch.arange(n) // slots], torch.arange(n) % slots
            self.planes[0][block, place], self.planes[1][block, place] = data.to(DEVICE), scale.to(DEVICE)
            self.values.append(mxfp4.dequantise(data, scale).double())

    def rows(self, spans: list[tuple[int, int, int]]) -> IndexRows:
        """Spans of (request, first visible, last visible): one row a number between."""
        request = torch.cat([torch.full((last - first + 1,), r) for r, first, last in spans])
        visible = torch.cat([torch.arange(first, last + 1) for _, first, last in spans])
        return IndexRows(
            request_T=request.to(DEVICE), visible_T=visible.to(DEVICE), block_table_RB=self.table.to(DEVICE)
        )


def queries(
    rows: int, *, spread: float = 2.0, heads: int = HEADS, channels: int = CHANNELS, seed: int = 1
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = scattered(rows, heads, channels, spread=spread, generator=generator)
    weight = torch.randn(rows, heads, generator=generator)
    return mxfp4.quantise_dequantise(q.bfloat16()).to(DEVICE), weight.bfloat16().to(DEVICE)


def scores_of(q: Tensor, weight: Tensor, keys: Keys, rows: IndexRows) -> list[Tensor]:
    """fp32 scores of the visible entries of each row, in float64 and rounded once."""
    out = []
    q, weight = q.cpu(), weight.cpu()
    for row, (request, visible) in enumerate(
        zip(rows.request_T.tolist(), rows.visible_T.tolist(), strict=True)
    ):
        dots = (q[row].double() @ keys.values[request][:visible].T).relu()
        scale = q.shape[2] ** -0.5 * q.shape[1] ** -0.5
        out.append(((weight[row].double() * scale).unsqueeze(1) * dots).sum(0).float())
    return out


def padded(places: list[int], count: int) -> list[int]:
    return places + [-1] * (count - len(places))


def check_selection(indexer: Indexer, got: list[int], scores: Tensor, count: int) -> None:
    """``got`` is the slow twin's choice among fp32 ``scores``, or as good as it where the implementation adds in fp32."""
    want = padded(best(scores, count), count)
    if adds_in_float64(indexer) or got == want:
        assert got == want
        return
    chosen = [place for place in got if place >= 0]
    assert got == padded(sorted(set(chosen)), count) and len(chosen) == sum(place >= 0 for place in want)
    swapped = set(chosen) ^ {place for place in want if place >= 0}
    edge = scores[[place for place in want if place >= 0]].min()
    near = 1e-5 * scores[scores.isfinite()].abs().max()
    assert all(abs(scores[place] - edge) <= near for place in swapped)


SPANS = [(0, 0, 60), (1, 5, 5), (2, 30, 41)]


@SHAPES
@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("spread", [0.0, 2.0, 9.0])
def test_select_takes_the_best_visible_entries(
    indexer: Indexer, count: int, spread: float, heads: int, channels: int, members: int
) -> None:
    """Several requests in one call, from nothing visible on; wide spreads leave fp32 and take the float64 path."""
    keys = Keys([60, 7, 44], spread=spread, channels=channels)
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel(), spread=spread, heads=heads, channels=channels)
    out = indexer.select(q, weight, keys=keys.planes, rows=rows, count=count)
    for got, scores in zip(out.tolist(), scores_of(q, weight, keys, rows), strict=True):
        check_selection(indexer, got, scores, count)


def test_select_at_released_shapes(indexer: Indexer) -> None:
    """32 heads of 128 channels, blocks of 128 entries, six rows a request, more visible than are chosen."""
    keys = Keys([2043, 700], channels=128, slots=128, spread=1.0)
    rows = keys.rows([(0, 2038, 2043), (1, 690, 695)])
    q, weight = queries(12, heads=32, channels=128, spread=1.0)
    args = {"keys": keys.planes, "rows": rows}
    chosen, candidates = indexer.select_with_candidates(q, weight, **args, count=512, blocks=80, block_size=8)
    again = indexer.select(q, weight, **args, count=512)
    within = indexer.select_within(q, weight, **args, count=512, candidates_TM=candidates.int(), block_size=8)
    assert torch.equal(chosen, again)
    scores = scores_of(q, weight, keys, rows)
    for row, (got, inside, blocks) in enumerate(
        zip(chosen.tolist(), within.tolist(), candidates.tolist(), strict=True)
    ):
        check_selection(indexer, got, scores[row], 512)
        kept = torch.tensor([place // 8 in blocks for place in range(scores[row].numel())])
        check_selection(indexer, inside, scores[row].masked_fill(~kept, -INF), 512)


@SHAPES
def test_select_within_takes_only_candidates(
    indexer: Indexer, heads: int, channels: int, members: int
) -> None:
    keys = Keys([60, 7, 44], channels=channels)
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel(), heads=heads, channels=channels)
    generator = torch.Generator().manual_seed(5)
    candidates = torch.full((rows.request_T.numel(), 3), -1, dtype=torch.int32)
    for row, visible in enumerate(rows.visible_T.tolist()):
        blocks = torch.randperm(-(-visible // members), generator=generator)[:3].sort().values
        candidates[row, : blocks.numel()] = blocks
    out = indexer.select_within(
        q,
        weight,
        keys=keys.planes,
        rows=rows,
        count=5,
        candidates_TM=candidates.to(DEVICE),
        block_size=members,
    )
    for got, scores, blocks in zip(
        out.tolist(), scores_of(q, weight, keys, rows), candidates.tolist(), strict=True
    ):
        inside = torch.tensor(
            [place // members in blocks for place in range(scores.numel())], dtype=torch.bool
        )
        check_selection(indexer, got, scores.masked_fill(~inside, -INF), 5)


@SHAPES
@pytest.mark.parametrize("blocks", [3, 5, 40])
def test_select_with_candidates_keeps_the_best_blocks_and_the_newest(
    indexer: Indexer, blocks: int, heads: int, channels: int, members: int
) -> None:
    keys = Keys([60, 7, 44], channels=channels)
    rows = keys.rows(SPANS)
    q, weight = queries(rows.request_T.numel(), heads=heads, channels=channels)
    chosen, candidates = indexer.select_with_candidates(
        q, weight, keys=keys.planes, rows=rows, count=5, blocks=blocks, block_size=members
    )
    for got, kept, scores in zip(
        chosen.tolist(), candidates.tolist(), scores_of(q, weight, keys, rows), strict=True
    ):
        check_selection(indexer, got, scores, 5)  # its own selection is not restricted
        peaks = (
            torch.tensor([part.max() for part in scores.split(members)]) if scores.numel() else torch.zeros(0)
        )
        if peaks.numel():
            peaks[-1] = INF
        check_selection(indexer, kept, peaks, blocks)


@SHAPES
def test_select_is_the_same_for_any_tiling_and_company(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch, heads: int, channels: int, members: int
) -> None:
    keys = Keys([300, 123], channels=channels)
    rows = keys.rows([(0, 260, 300), (1, 100, 123)])
    q, weight = queries(rows.request_T.numel(), heads=heads, channels=channels)

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
    reference_sizes = {"KEY_TILE": 24, "COLUMNS": 5, "DOT_BYTES": 2000, "GATHER_BYTES": 50_000}
    for name, size in {
        **reference_sizes,
        "SCORE_BYTES": 20_000,
        "PROGRAMS": 3,
        "PARTS": 200,
        "LONG": 64,
        "MOST_PLACES": 64,
        "MOST_ROWS": 8,
    }.items():
        if name in module:
            monkeypatch.setitem(module, name, size)
    assert all(torch.equal(w, t) for w, t in zip(whole, run(slice(None)), strict=True))


@SHAPES
def test_select_survives_garbage_keys(indexer: Indexer, heads: int, channels: int, members: int) -> None:
    """A05: NaN keys are never selected while a number is left, and every index is in range."""
    keys = Keys([60], channels=channels)
    keys.planes[1][keys.table[0, :3].to(DEVICE)] = 0xFF
    rows = keys.rows([(0, 60, 60)])
    q, weight = queries(1, heads=heads, channels=channels)
    out = indexer.select(q, weight, keys=keys.planes, rows=rows, count=40)[0]
    assert (out[:36] >= 24).all() and out[:36].unique().numel() == 36 and (out[36:] == -1).all()


def test_select_sees_small_groups_beside_large_ones(indexer: Indexer) -> None:
    """A large group cancels to nothing and a small one decides: fp32 sums would lose it, and must not be used here."""
    if not adds_in_float64(indexer):
        pytest.skip("its dot products are sums in fp32")
    keys = Keys([20])
    small = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(5)
    x = torch.zeros(20, CHANNELS)
    x[:, 0], x[:, 1], x[:, 33], x[:, 34] = 6.0, small, 2.0**26, -(2.0**26)
    block, place = keys.table[0][torch.arange(20) // SLOTS], torch.arange(20) % SLOTS
    keys.planes[0][block, place], keys.planes[1][block, place] = mxfp4.quantise(x.to(DEVICE))
    q = torch.zeros(1, HEADS, CHANNELS, device=DEVICE)
    q[:, :, [1, 33, 34]] = 1.0
    out = indexer.select(
        q.bfloat16(),
        torch.ones(1, HEADS, device=DEVICE).bfloat16(),
        keys=keys.planes,
        rows=keys.rows([(0, 20, 20)]),
        count=5,
    )
    assert out[0].tolist() == [3, 7, 11, 15, 19]


def dequantised(keys: Keys, entry: int) -> Tensor:
    """float64 [K]: what the record of an entry of request 0 says now."""
    data, scale = keys.planes
    slots = data.shape[1]
    block, place = keys.table[0, entry // slots], entry % slots
    return mxfp4.dequantise(data[block, place], scale[block, place]).double()


def test_scores_do_not_depend_on_the_form_that_neighbours_ask_for(indexer: Indexer) -> None:
    """Narrow scales go through integers, wide ones of a key or a query through other forms, for a whole tile or run."""
    scores_in = indexer._loaded["select"].__globals__.get("_scores")
    if scores_in is None or "SCORE" not in scores_in.__globals__:
        pytest.skip("it has one form")
    keys = Keys([256], channels=128, slots=16, spread=0.0)
    rows = keys.rows([(0, 251, 256)])
    q, weight = queries(6, heads=32, channels=128, spread=0.0)

    def scores(q: Tensor) -> Tensor:
        return scores_in(q, weight, keys=keys.planes, rows=rows, run=8, peaks=False, least=0)[0][:, :251]

    plain = scores(q)
    for row, (got, want) in enumerate(zip(plain.cpu(), scores_of(q, weight, keys, rows), strict=True)):
        dots = (q[row].cpu().double() @ keys.values[0][:251].T).relu() * weight[row].cpu().double().abs()[
            :, None
        ]
        bound = 36 * 2.0**-24 * dots.sum(0) * (32 * 128) ** -0.5
        assert ((got - want[:251]).abs() <= bound).all()
    mixed = q.clone()
    mixed[5] = queries(1, heads=32, channels=128, spread=9.0)[0][0]
    assert torch.equal(scores(mixed)[:5], plain[:5])
    scale = keys.planes[1][keys.table[0, 1], 1]
    others = torch.arange(251, device=DEVICE) != 17
    first = scale[0].clone()
    for octaves in (4, 9):
        scale[0] = scale.max() - octaves
        assert torch.equal(scores(q)[:, others], plain[:, others])
        assert not torch.equal(scores(q)[:, 17], plain[:, 17])
        dots = (q.double() @ dequantised(keys, 17)).relu() * weight.double()
        want = dots.sum(1) * (32 * 128) ** -0.5
        assert (
            (scores(q)[:, 17] - want).abs() <= 36 * 2.0**-24 * dots.abs().sum(1) * (32 * 128) ** -0.5
        ).all()
        scale[0] = first


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are captured on a GPU")
@SHAPES
def test_select_is_captured_once_for_any_sizes(
    indexer: Indexer, heads: int, channels: int, members: int
) -> None:
    """Nothing asks the device: a captured graph gives what a call gives after visible counts and queries have changed."""
    if adds_in_float64(indexer):
        pytest.skip("the reference reads sizes from the device")
    keys = Keys([300, 123, 40], channels=channels)
    rows = keys.rows([(0, 20, 25), (1, 30, 35), (2, 0, 0)])
    q, weight = queries(13, heads=heads, channels=channels)

    def run() -> tuple[Tensor, ...]:
        args = {"keys": keys.planes, "rows": rows, "count": 9}
        chosen, candidates = indexer.select_with_candidates(q, weight, **args, blocks=6, block_size=8)
        within = indexer.select_within(q, weight, **args, candidates_TM=candidates, block_size=8)
        return chosen, candidates, within

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    other = keys.rows([(0, 290, 295), (1, 100, 105), (2, 0, 0)])
    rows.visible_T.copy_(other.visible_T)
    q.copy_(queries(13, heads=heads, channels=channels, seed=2)[0])
    for out in captured:
        out.fill_(-7)
    graph.replay()
    assert all(torch.equal(c, e) for c, e in zip(captured, run(), strict=True))


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


def test_select_memory_does_not_grow_with_rows_times_entries(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A35: what is alive at once is bounded, whatever the batch and the length."""
    module = indexer._loaded["select"].__globals__
    if "SCORE_BYTES" in module:
        monkeypatch.setitem(module, "SCORE_BYTES", 8 << 20)
    heads, channels = (32, 128) if DEVICE.type == "cuda" else (HEADS, CHANNELS)  # what a row tiles itself
    keys = Keys([90_000], spread=0.0, channels=channels)
    peaks = []
    for rows, visible in ((64, 40_000), (64, 90_000), (256, 40_000)):
        q, weight = queries(rows, spread=0.0, heads=heads, channels=channels)
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
    assert max(peaks) < whole / 3
    assert not adds_in_float64(indexer) or max(peaks) == min(peaks)
