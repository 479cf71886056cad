"""Floors equal the specification's, number by number (printed by ``spec/floors.py --json``, 2026-12-01)."""

import pytest

from flashstep.bench import floors
from flashstep.config.presets import released
from flashstep.parallel.layout import Layout

LAYOUTS = {
    "dep8": Layout(kind="dep", size=8),
    "dep32": Layout(kind="dep", size=32),
    "tp4": Layout(kind="tp", size=4),
}
DECODE_US = (  # layout, requests, rows each, target, draft; at 131,072 tokens of context
    ("dep8", 1, 1, 2995.822278419767, 0.0),
    ("dep8", 1, 6, 6551.166345870687, 648.5840430236361),
    ("dep8", 8, 6, 11379.250070788292, 730.1303724888469),
    ("dep8", 64, 6, 16637.18194722633, 1105.9765689311746),
    ("dep32", 16, 6, 5038.988949829566, 574.0404561766263),
    ("dep32", 64, 6, 11891.573264706956, 1032.004409228849),
    ("tp4", 1, 6, 2172.8787675498775, 198.25267777746686),
    ("tp4", 64, 6, 20167.441612623363, 694.9568084999075),
)
PREFILL_MS = (  # layout, context; the last 8,192 tokens of a prompt
    ("dep8", 0, 118.31161796847991),
    ("dep8", 131072, 127.22242240888524),
    ("dep8", 524288, 153.88557938245324),
    ("tp4", 0, 48.694110010314645),
    ("tp4", 524288, 84.37882251355498),
)


@pytest.mark.parametrize(("layout", "requests", "rows", "target", "draft"), DECODE_US)
def test_decoding(layout: str, requests: int, rows: int, target: float, draft: float) -> None:
    model, shape = released(), {"requests": requests, "rows": rows}
    parts = floors.decode(model, LAYOUTS[layout], **shape, context=131072)
    assert 1e6 * floors.total(parts) == pytest.approx(target, rel=1e-12)
    if draft:
        assert 1e6 * floors.total(floors.draft(model, LAYOUTS[layout], **shape)) == pytest.approx(
            draft, rel=1e-12
        )
    both = floors.of_step(model, LAYOUTS[layout], **shape, context=131072, drafts=draft > 0)
    assert 1e6 * floors.total(both) == pytest.approx(target + draft, rel=1e-12)


@pytest.mark.parametrize(("layout", "context", "ms"), PREFILL_MS)
def test_a_prompt_s_last_chunk(layout: str, context: int, ms: float) -> None:
    parts = floors.prefill(released(), LAYOUTS[layout], rows=8192, context=context, ends=True)
    assert 1e3 * floors.total(parts) == pytest.approx(ms, rel=1e-12)


def test_a_chunk_from_the_middle_runs_nothing_past_the_last_source() -> None:
    """performance.md 3.4: 111.9 / 120.7 / 147.1 ms at 0 / 128K / 512K."""
    for context, ms in ((0, 111.9), (131072, 120.7), (524288, 147.1)):
        parts = floors.prefill(released(), LAYOUTS["dep8"], rows=8192, context=context, ends=False)
        assert 1e3 * floors.total(parts) == pytest.approx(ms, abs=0.06)
        assert "head" not in {part.name for part in parts}
