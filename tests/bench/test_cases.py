"""Cases are read as they are written, and their batches say what they mean."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashstep.bench.cases import Case, fill
from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.config.errors import ConfigError
from tests.model.tiny import cached_configuration

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "name", "decodes"),
    [
        ("6", "1*6@0", False),
        ("1*6@131072", "1*6@131072:5", True),
        ("8*6@131072:3", "8*6@131072:3", True),
        ("8192@524288c", "1*8192@524288c", False),
        ("8192", "1*8192@0", False),
        ("7@64", "1*7@64", False),
        ("2*3@9c", "2*3@9c", False),
        ("1@5:0", "1*1@5:0", True),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, name: str, decodes: bool) -> None:
    case = Case.parse(text, draft_block=5)
    assert (case.name, case.decodes) == (name, decodes)
    assert Case.parse(case.name, draft_block=5) == case


@pytest.mark.parametrize("text", ["", "x", "6*", "@5", "6@", "0", "0*6", "6:5@9", "-1", "6@5cc"])
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="case"):
        Case.parse(text, draft_block=5)


def pool_for(case: Case, *, size: int = 4) -> CachePool:
    model = cached_configuration("A")
    return CachePool(
        CacheGroups.of(model, drafts=True),
        num_blocks=case.blocks(block_size=size),
        num_window_blocks=case.window_blocks(block_size=size, window=model.sliding_window),
        block_size=size,
        num_slots=case.requests,
        device=CPU,
    )


def test_a_prompt_s_end_keeps_its_last_window_and_one_row_of_logits_a_request() -> None:
    model = cached_configuration("A")
    case = Case.parse("2*20@40", draft_block=3)
    batch = case.forward_batch(model, pool_for(case))
    window = model.sliding_window
    assert batch.positions_T.tolist() == 2 * list(range(40, 60))
    assert batch.tail_rows is not None and batch.tail_start_R is not None and batch.logit_rows is not None
    assert batch.tail_rows.tolist() == [*range(20 - window, 20), *range(40 - window, 40)]
    assert batch.tail_start_R.tolist() == [60 - window] * 2
    assert batch.tail_rows[batch.logit_rows].tolist() == [19, 39]
    held = batch.window_table_RB >= 0
    assert held.sum() == case.window_blocks(block_size=4, window=window)
    assert held[:, (40 - window) // 4 :].all()


def test_a_piece_from_the_middle_samples_nothing() -> None:
    case = Case.parse("20@40c", draft_block=3)
    batch = case.forward_batch(cached_configuration("A"), pool_for(case))
    assert batch.tail_rows is not None and batch.logit_rows is not None
    assert batch.tail_rows.numel() == batch.logit_rows.numel() == 0


def test_filled_records_are_finite_and_of_order_one() -> None:
    from flashstep.quant.tensor import MXFP4, MXFP8, NVFP4

    model = cached_configuration("A")
    pool = pool_for(Case.parse("2*20@40", draft_block=3))
    pool.poison()
    fill(pool, model)
    records = [
        MXFP8.dequantise(
            pool.window(layer).planes[0].view(torch.float8_e4m3fn),
            pool.window(layer).planes[1],
            dtype=torch.float32,
        )
        for layer in pool.window_layers
    ]
    for layer in model.kv_source_layer_ids:
        view = pool.source(layer)
        values, scales = view.compressed
        records.append(NVFP4.dequantise(values, scales.view(torch.float8_e4m3fn), dtype=torch.float32))
        records.append(MXFP4.dequantise(*view.index_keys, dtype=torch.float32))
        exponents = view.index_keys[1].int()
        assert (
            exponents.amax(-1) - exponents.amin(-1)
        ).max() <= 2  # binades within a key, as stored keys have them
        assert view.tail is None or view.tail.isfinite().all()
    for record in records:
        assert record.isfinite().all() and 0.1 < record.std() < 10


@given(
    st.builds(
        Case,
        requests=st.integers(1, 10**6),
        rows=st.integers(1, 10**6),
        context=st.integers(0, 10**7),
        continues=st.booleans(),
        drafts=st.none() | st.integers(0, 9),
    )
)
def test_a_case_reads_back_as_it_is_named(case: Case) -> None:
    """But for the shorthand: few rows behind a context are a step of decoding."""
    again = Case.parse(case.name, draft_block=5)
    shorthand = case.drafts is None and not case.continues and case.rows <= 6 and case.context > 0
    assert again == (msgspec.structs.replace(case, drafts=5) if shorthand else case)
    assert Case.parse(again.name, draft_block=5) == again


@given(st.text(alphabet="0123456789*@c: -", max_size=12) | st.text(max_size=8))
def test_any_text_is_a_case_or_refused(text: str) -> None:
    try:
        assert Case.parse(text, draft_block=5).rows >= 1
    except ConfigError as error:
        assert error.problems
