"""What is seen of a run of load: lines where there is no terminal, a bar where there is one; a model's text in neither."""

import io
import time
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from flashstep.bench.load.client import Answered
from flashstep.cli import load_progress, terminal
from flashstep.cli.load_progress import LoadProgress


def answered(fault: str = "") -> Answered:
    return msgspec.convert(
        {
            "key": "k",
            "sent_s": 0.0,
            "ended_s": 1.0,
            "first_s": 0.25,
            "output_tokens": 50,
            "text": "[red]secret[/red]",
            "fault": fault,
        },
        Answered,
    )


def seen(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, total: int | None, duration_s: float | None
) -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=120, markup=False)
    for module in (load_progress, terminal):
        monkeypatch.setattr(module, "NOTES", console)
    monkeypatch.setattr(load_progress, "LINE_EVERY_S", 0.05)
    monkeypatch.setattr(load_progress, "REFRESH_S", 0.05)
    progress = LoadProgress()
    run = SimpleNamespace(open={"k": time.perf_counter() - 60})
    with progress.begin(run, total, duration_s):
        progress.took(answered())
        progress.took(answered("cut off"))
        time.sleep(0.3)
    return written.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_requests_failures_and_what_waits_are_shown(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    told = seen(monkeypatch, is_terminal=is_terminal, total=9, duration_s=None)
    for words in ("2 of 9 answered", "1 open", "1 FAILED", "TTFT 250 ms", "the oldest open for 60 s"):
        assert words in told
    assert "secret" not in told
    assert ("\x1b[" in told) == is_terminal


def test_a_run_by_time_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert " of 30 s: 2 answered" in seen(monkeypatch, is_terminal=False, total=None, duration_s=30.0)
