"""Ours beside other engines' kernels on one GPU, same process, same rounds: ``python tests/peers/compare.py SECTION HARNESS``.

HARNESS is ../shared/peers (see its README): the peers' libraries and the timing come with it: graphs of 20 calls over rotated
buffers, interleaved rounds, medians. PEERS_LIBS is the unpacked archive, OUT where results.jsonl grows. Formats differ where
engines differ (records, keys): each reads its own bytes of the same shape. Nobody's kernel is a dependency of a test.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, sys.argv[2])

import common
import mla as peers_mla

from flashstep.bench.chain import SHAPES, TOKENS, router_chain
from flashstep.kernels import choose_ops
from flashstep.kernels.attention import AttentionRows
from flashstep.kernels.indexer import IndexRows
from flashstep.quant import mxfp4

OURS = "flashstep"
DEVICE = torch.device("cuda", 0)
L2_BYTES = 60e6
WINDOW, SELECTED, CHANNELS, CONTEXT, BLOCK = 128, 512, 512, 131_072, 64
DRAFT_ROWS = 6
Call = Callable[..., Any]


def timed(
    rows: Any, case: str, calls: dict[str, tuple[Call, int]], *, floor: float, errors: dict[str, float]
) -> None:
    """Graphs of all ``calls`` (function of a number, how many in a graph), interleaved; a row each."""
    graphs = {name: (common.capture(call, count), count) for name, (call, count) in calls.items()}
    for name, time in common.time_graphs(graphs).items():
        rows.add(case, name, time, floor, errors.get(name))


def copies_of(nbytes: int, most: int) -> int:
    return int(max(2, min(most, 2.5 * L2_BYTES // max(nbytes, 1) + 1)))


# ---- top-k ------------------------------------------------------------------------------------------------------------


def topk() -> None:
    common.load("_C_stable_libtorch")
    rows = common.Rows("topk")
    common.warm()
    for count, width in (
        (6, 16_384),
        (6, 131_072),
        (6, 1_048_576),
        (96, 16_384),
        (96, 131_072),
        (96, 1_048_576),
        (384, 131_072),
    ):
        topk_case(rows, count=count, width=width)


def topk_case(rows: Any, *, count: int, width: int) -> None:
    ops = choose_ops(DEVICE).indexer
    copies = copies_of(4 * count * width, 64)
    scores = [torch.randn(count, width, device=DEVICE) for _ in range(copies)]
    for tied in scores:
        tied[:, ::7] = (tied[:, ::7] * 4).round() / 4  # ties, at the boundary too
    lengths = torch.full((count, 1), width, dtype=torch.int32, device=DEVICE)
    space = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    calls = max(20, copies)
    out = torch.empty(calls, count, SELECTED, dtype=torch.int32, device=DEVICE)

    def cooperative(i: int) -> None:
        torch.ops._C.cooperative_topk(scores[i % copies], lengths, out[i], space, SELECTED, width)

    def persistent(i: int) -> None:
        torch.ops._C.persistent_topk(scores[i % copies], lengths, out[i], space, SELECTED, width)

    def ours(i: int) -> torch.Tensor:
        return ops.top(scores[i % copies], count=SELECTED)

    places = scores[0].sort(dim=1, descending=True, stable=True).indices
    wanted = places[:, :SELECTED].sort(dim=1).values
    runs = [ours(0).long() for _ in range(20)]
    wrong = max(float((run != wanted).any()) for run in runs)
    arms: dict[str, tuple[Call, int]] = {OURS: (ours, calls), "vllm persistent_topk": (persistent, calls)}
    if count <= 64:
        arms["vllm cooperative_topk"] = (cooperative, calls)
    timed(rows, f"{count} x {width}", arms, floor=rows.floor(4 * count * width), errors={OURS: wrong})


# ---- indexer logits ---------------------------------------------------------------------------------------------------


def indexer() -> None:
    rows = common.Rows("indexer")
    common.warm()
    for requests, entries, copies in ((1, 131_072, 10), (1, 524_288, 4), (1, 1_048_576, 2), (8, 131_072, 2)):
        indexer_case(rows, requests=requests, entries=entries, copies=copies)


def indexer_case(rows: Any, *, requests: int, entries: int, copies: int) -> None:
    from flashstep.kernels.indexer import cuda

    deep_gemm, logits = deep_gemm_logits()
    reference = choose_ops(DEVICE, kernels="reference").indexer
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    pages, page = entries // 64, 64
    total = copies * requests * pages
    queries, heads = requests * DRAFT_ROWS, 32
    q = (torch.randn(requests, DRAFT_ROWS, heads, 128, device=DEVICE) * 4).to(torch.float8_e4m3fn)
    weights = torch.randn(queries, heads, device=DEVICE)
    cache = torch.empty(total, page * 132, dtype=torch.uint8, device=DEVICE)
    for first in range(0, total, pages):
        keys = (torch.randn(pages, page * 128, device=DEVICE) * 4).to(torch.float8_e4m3fn)
        cache[first : first + pages, : page * 128] = keys.view(torch.uint8)
    scales = torch.exp2(torch.randint(-5, 1, (total, page), device=DEVICE).float())
    cache[:, page * 128 :] = scales.view(torch.uint8).view(total, -1)
    paged = cache.view(total, page, 1, 132)
    tables = torch.arange(total, dtype=torch.int32, device=DEVICE).view(copies, requests, pages)
    ours_keys = {
        OURS: normal_keys(total, page),
        f"{OURS}, scales of six octaves": (
            torch.randint(0, 256, (total, page, 64), dtype=torch.uint8, device=DEVICE),
            torch.randint(121, 127, (total, page, 4), dtype=torch.uint8, device=DEVICE),
        ),
    }
    q_THK = reference_queries(queries, heads)
    weight_TH = torch.randn(queries, heads, device=DEVICE).bfloat16()
    visible = entries - DRAFT_ROWS + 1 + torch.arange(DRAFT_ROWS, device=DEVICE).repeat(requests)
    index_rows = [
        IndexRows(
            request_T=torch.arange(requests, device=DEVICE).repeat_interleave(DRAFT_ROWS),
            visible_T=visible,
            block_table_RB=table.long(),
        )
        for table in tables
    ]

    def grouped(width: int) -> Call:
        batches = queries // width
        lengths = torch.full((batches, width), entries, dtype=torch.int32, device=DEVICE)
        meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, multiprocessors)
        table = [t.repeat_interleave(DRAFT_ROWS // width, 0).contiguous() for t in tables]
        shaped = q.view(torch.uint8).view(batches, width, heads, 128).view(torch.float8_e4m3fn)
        return lambda i: logits(shaped, paged, weights, lengths, table[i % copies], meta, entries)

    def ours(i: int, name: str = OURS) -> torch.Tensor:
        return cuda._scores(
            q_THK,
            weight_TH,
            keys=ours_keys[name],
            rows=index_rows[i % copies],
            peaks=False,
            least=SELECTED,
            run=DRAFT_ROWS,
        )[0]

    args = {"keys": ours_keys[OURS], "rows": index_rows[0], "count": SELECTED}
    chosen = choose_ops(DEVICE).indexer.select(q_THK, weight_TH, **args)
    error = float("nan")
    if entries * queries <= 1 << 20:
        error = float((chosen != reference.select(q_THK, weight_TH, **args)).float().mean())
    own = rows.floor(
        requests * (entries * 68 + 4 * DRAFT_ROWS * entries), queries * entries * 2 * heads * 128
    )
    arms = {
        **{name: ((lambda i, name=name: ours(i, name)), 20) for name in ours_keys},
        "DeepGEMM 6 single rows": (grouped(1), 20),
        "DeepGEMM 3 x 2": (grouped(2), 20),
    }
    timed(rows, f"{requests} x 6 rows, {entries} keys", arms, floor=own, errors={OURS: error})


def deep_gemm_logits() -> tuple[Any, Call]:
    """The library and its logits of paged keys: vLLM's copy where it was carried, else sgl-deep-gemm 0.1.4."""
    folder = next(f for f in (Path(common.LIBS) / "vllm_dg", Path(common.LIBS) / "sgl_dg") if f.is_dir())
    sys.path.insert(0, str(folder))
    import deep_gemm

    if folder.name == "sgl_dg":
        return deep_gemm, lambda q, *rest: deep_gemm.fp8_paged_mqa_logits(q, *rest, False)
    return deep_gemm, lambda q, *rest: deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *rest)


def normal_keys(blocks: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache holds of normalised vectors: their groups' scales lie within three octaves. 4,096 blocks, repeated."""
    some = min(blocks, 4096)
    data, scale = mxfp4.quantise(torch.randn(some * slots, 128, device=DEVICE).bfloat16())
    numbers = torch.arange(blocks, device=DEVICE) % some
    return data.view(some, slots, 64)[numbers], scale.view(some, slots, 4)[numbers]


def reference_queries(queries: int, heads: int) -> torch.Tensor:
    """bf16 [T, H, 128] that MXFP4 has rounded, as the op takes them."""
    x = torch.randn(queries, heads, 128, device=DEVICE).bfloat16()
    return choose_ops(DEVICE, kernels="reference").cast.round_mxfp4(x)


# ---- sparse attention -------------------------------------------------------------------------------------------------


def mla() -> None:
    common.load("_flashmla_C")
    rows = common.Rows("mla")
    common.warm()
    for count in (6, 48, 96, 384):
        mla_case(rows, count=count)


def mla_case(rows: Any, *, count: int) -> None:
    ops = choose_ops(DEVICE).attention
    invariant = choose_ops(DEVICE, batch_invariant=True).attention
    plain = choose_ops(DEVICE, kernels="reference").attention
    pool = 16
    _, peer_cache = peers_mla.make_cache((64 * (WINDOW + 64) + pool * CONTEXT) // peers_mla.PAGE)
    blocks = pool * CONTEXT // BLOCK
    window = (e4m3(64 * 4, BLOCK, CHANNELS), e8m0(64 * 4, BLOCK, CHANNELS // 32))
    compressed = (
        torch.randint(0, 256, (blocks, BLOCK, CHANNELS // 2), dtype=torch.uint8, device=DEVICE),
        torch.randint(40, 80, (blocks, BLOCK, CHANNELS // 16), dtype=torch.uint8, device=DEVICE),
    )
    requests = count // DRAFT_ROWS
    copies = copies_of(count * (WINDOW + SELECTED) * 300, 64)
    calls = max(20, copies)
    own_rows = attention_rows(requests, pool)
    selected = [choices(count) for _ in range(copies)]
    lengths = [torch.full((count,), n, dtype=torch.int32, device=DEVICE) for n in (WINDOW, SELECTED)]
    sink = torch.randn(64, device=DEVICE)
    peer_q = [torch.randn(count, 1, 64, CHANNELS, device=DEVICE).bfloat16() for _ in range(4)]
    near = torch.arange(WINDOW, dtype=torch.int32, device=DEVICE).expand(count, 1, WINDOW).contiguous()
    far = [
        (s + (torch.arange(count, device=DEVICE, dtype=torch.int32) // DRAFT_ROWS % pool * CONTEXT)[:, None])
        .view(count, 1, SELECTED)
        .contiguous()
        for s in selected
    ]
    out = torch.empty(count, 1, 64, CHANNELS, device=DEVICE, dtype=torch.bfloat16)

    def peer(i: int, meta: tuple[Any, Any]) -> Any:
        return torch.ops._flashmla_C.sparse_decode_fwd(
            peer_q[i % 4], peer_cache, near, lengths[0], sink, meta[0], meta[1], peer_cache, far[i % copies], lengths[1],
            CHANNELS, CHANNELS**-0.5, out, False,
        )  # fmt: skip

    made = peer(0, (None, None))
    arms: dict[str, tuple[Call, int]] = {
        "vllm _flashmla_C (64 heads)": (lambda i, meta=(made[2], made[3]): peer(i, meta), calls)
    }
    errors = {}
    angles = torch.randn(count, 32, device=DEVICE)
    for heads in (16, 64):
        q_THC = torch.randn(count, heads, CHANNELS, device=DEVICE).bfloat16()
        fixed = {
            "cos_TP": angles.cos(), "sin_TP": angles.sin(), "window": window, "compressed": compressed, "rows": own_rows,
            "width": WINDOW, "sink_H": sink[:heads].contiguous(),
        }  # fmt: skip
        for name, family in (
            (f"{OURS}, {heads} heads", ops),
            (f"{OURS}, {heads} heads, batch-invariant", invariant),
        ):

            def ours(i: int, q=q_THC, fixed=fixed, family=family) -> torch.Tensor:
                return family.attend_sparse(q, selected_TK=selected[i % copies], **fixed)

            if count <= 48:
                errors[name] = common.rel(
                    ours(0), plain.attend_sparse(q_THC, selected_TK=selected[0], **fixed)
                )
            arms[name] = (ours, calls)
    flops = count * (WINDOW + SELECTED) * 64 * CHANNELS * 4
    floor = rows.floor(count * ((WINDOW + SELECTED) * 584 + 64 * CHANNELS * 4), flops, "bf16")
    timed(rows, f"{count} rows", arms, floor=floor, errors=errors)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(4).to(torch.float8_e4m3fn).view(torch.uint8)


def e8m0(*shape: int) -> torch.Tensor:
    return torch.randint(121, 127, shape, dtype=torch.uint8, device=DEVICE)


def choices(count: int) -> torch.Tensor:
    """int32 [T, 512], ascending: one entry of each of 512 stretches of the context."""
    stretch = CONTEXT // SELECTED
    places = torch.randint(0, stretch, (count, SELECTED), dtype=torch.int32, device=DEVICE)
    return torch.arange(SELECTED, dtype=torch.int32, device=DEVICE) * stretch + places


def attention_rows(requests: int, pool: int) -> AttentionRows:
    """Six rows a request near the end of a context of 131,072 tokens, ratio 1; the requests share ``pool`` contexts."""
    columns = CONTEXT // BLOCK
    request_R = torch.arange(requests, device=DEVICE)
    position_R = CONTEXT - DRAFT_ROWS + torch.arange(DRAFT_ROWS, device=DEVICE)
    window_RB = torch.full((requests, columns), -1, dtype=torch.int64, device=DEVICE)
    window_RB[:, -4:] = request_R[:, None] * 4 % 256 + torch.arange(4, device=DEVICE)
    return AttentionRows(
        positions_T=position_R.repeat(requests),
        request_T=request_R.repeat_interleave(DRAFT_ROWS),
        window_table_RB=window_RB,
        window_start_R=torch.zeros(requests, dtype=torch.int64, device=DEVICE),
        block_table_RB=(request_R % pool)[:, None] * columns + torch.arange(columns, device=DEVICE),
    )


# ---- router chain -----------------------------------------------------------------------------------------------------


def router() -> None:
    """Ours alone: the peers' chain is ``chain.py`` of the harness, run in the same command."""
    rows = common.Rows("router chain")
    common.warm()
    for shape in SHAPES:
        experts, count, hidden, layers, scoring = shape
        for tokens in TOKENS:
            work, _ = router_chain(shape, tokens=tokens, ops=choose_ops(DEVICE), device=DEVICE)
            graph = common.capture(lambda _, work=work: work(), 1)
            nbytes = layers * (experts * hidden * 2 + tokens * (2 * hidden * 2 + count * 12))
            time = common.time_graphs({OURS: (graph, layers)})[OURS]
            rows.add(
                f"{experts}/{count}/{hidden} {scoring} T={tokens}, a layer",
                OURS,
                time,
                rows.floor(nbytes) / layers,
            )


SECTIONS = {"topk": topk, "indexer": indexer, "mla": mla, "router": router}

if __name__ == "__main__":
    torch.manual_seed(7)
    SECTIONS[sys.argv[1]]()
