"""Layouts are read as written; a rank's view is a valid model; folded experts see what a rank of the whole layout sees."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashstep.config.errors import ConfigError
from flashstep.config.presets import released
from flashstep.parallel.layout import WHOLE, Layout, local_expert_of
from flashstep.parallel.rank import Rank

RELEASED = released()


@pytest.mark.parametrize("text", ["", "tp4", "tp4:4", "dep0:0", "pp4:0", "tp4:-1", "tp4:0 "])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--emulate"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "wrong"), [("tp3:0", "vocab_size is 129280"), ("dep7:0", "n_routed_experts is 384")]
)
def test_what_cannot_be_shared_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Layout.parse(text).view(RELEASED)


def test_views_are_valid_models_of_the_expected_sizes() -> None:
    for text in ("tp2:1", "tp4:0", "tp8:7", "dep8:3", "dep32:0", "dep64:1"):
        assert Layout.parse(text).view(RELEASED).broken_rules() == []
    view = Layout.parse("tp4:0").view(RELEASED)
    assert (view.num_attention_heads, view.o_groups, view.moe_intermediate_size, view.vocab_size) == (
        16,
        2,
        576,
        32320,
    )
    assert Layout.parse("dep8:3").view(RELEASED) == RELEASED == WHOLE.view(RELEASED)


@pytest.mark.parametrize(
    ("text", "target", "draft"), [("dep8:3", 52, 16), ("dep32:0", 13, 4), ("tp4:0", 384, 128)]
)
def test_local_experts(text: str, target: int, draft: int) -> None:
    layout = Layout.parse(text)
    assert (layout.local_experts(384), layout.local_experts(128, replicas=False)) == (target, draft)


def test_replicated_experts_get_half_of_the_others_pairs() -> None:
    assert Counter(Counter(local_expert_of(384, parts=8, local=52)).values()) == {8: 44, 4: 8}
    assert Counter(Counter(local_expert_of(384, parts=32, local=13)).values()) == {32: 11, 16: 2}
    assert local_expert_of(128, parts=8, local=16) == [expert // 8 for expert in range(128)]
    placed = local_expert_of(384, parts=8, local=52)
    assert placed == sorted(placed), "what was in ascending order stays so"


@pytest.mark.parametrize(("parts", "local", "rows"), [(8, 52, 48), (32, 13, 96)])
def test_as_many_experts_are_touched_as_on_a_rank(parts: int, local: int, rows: int) -> None:
    """Against the ranks' real traffic: rows of all ranks, uniform routing, a replica taking every other pair."""
    torch.manual_seed(0)
    part, copies = 384 // parts, local - 384 // parts
    placed = torch.tensor(local_expert_of(384, parts=parts, local=local))
    folded = [placed[torch.rand(rows, 384).topk(6).indices].unique().numel() for _ in range(200)]
    real = []
    for _ in range(200):
        chosen = torch.rand(rows * parts, 384).topk(6).indices
        halves = chosen + 384 * (torch.rand(chosen.shape) < 0.5)
        own = torch.arange(part)
        mine = (
            torch.isin(own[copies:], chosen),
            torch.isin(own[:copies], halves),
            torch.isin(384 + part + own[:copies], halves),
        )
        real.append(sum(int(touched.sum()) for touched in mine))
    assert abs(sum(folded) - sum(real)) / 200 < 0.25


def test_a_rank_keeps_its_own_rows_and_says_what_it_leaves_out() -> None:
    rank = Rank(Layout.parse("dep8:3"))
    placement = rank.placement(384, local=52)
    assert placement is not None and placement.tolist() == local_expert_of(384, parts=8, local=52)
    assert Rank().placement(384, local=384) is None and Rank().excluded == ()
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(Rank(Layout.parse("tp2:0")).gather(x, width=6), torch.cat((x, x), dim=1))
    assert Rank().gather(x, width=3) is x
    assert "all-reduce" in Rank(Layout.parse("tp2:0")).excluded[0] and "dispatch" in rank.excluded[0]


@given(st.text(alphabet="tpde0123456789:", max_size=10) | st.text(max_size=8))
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    try:
        Layout.parse(text)
    except ConfigError as error:
        assert error.problems
