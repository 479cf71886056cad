"""Notes about speculation: one line at the end, SYNTHETIC in it where drafts stand by lot, nothing where nothing happened."""

import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.table import Table

from flashstep.cli.terminal import PIPED, Results, note_acceptance, warn_of_falsified
from flashstep.config.engine_options import EngineOptions
from flashstep.request import Acceptance
from tests.e2e.serving import ROOT

COUNTS = Acceptance(
    synthetic=False,
    num_tokens=2,
    steps=4,
    draft_tokens=8,
    accepted_tokens=5,
    histogram=(1, 1, 2),
    per_position=(3, 2),
)


def test_a_line_about_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    note_acceptance(COUNTS)
    line = "acceptance: 2.25 tokens a step over 4 steps; 5 of 8 drafts stood (by position: 0.75 0.50)\n"
    assert capsys.readouterr().err == line
    note_acceptance(msgspec.structs.replace(COUNTS, synthetic=True))
    assert capsys.readouterr().err == "SYNTHETIC " + line


def test_no_line_where_no_step_verified_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    note_acceptance(None)
    nothing = {"steps": 0, "draft_tokens": 0, "accepted_tokens": 0}
    note_acceptance(msgspec.structs.replace(COUNTS, histogram=(0, 0, 0), per_position=(0, 0), **nothing))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ()),
        ({"speculative_config": "{}"}, ()),
        (
            {
                "speculative_config": '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}',
                "fill_cache": True,
            },
            ("SYNTHETIC acceptance", "FILLED cache"),
        ),
        ({"routing": "uniform"}, ("UNIFORM routing",)),
        ({"routing": "recorded"}, ("RECORDED routing",)),
    ],
)
def test_what_makes_texts_wrong_is_announced(
    options: dict, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_falsified(EngineOptions(**options).engine(Path("m")).falsifies)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(words)
    assert all("wrong on purpose" in line for line in lines)


def numbers() -> Table:
    table = Table("class")
    for name in ("tokens", "value", "share"):
        table.add_column(name, justify="right")
    table.add_row("a long name of a class, which may be broken " * 2, *["123,456,789,012.25"] * 3)
    return table


@pytest.mark.parametrize("width", [PIPED, 120, 60, 20])
def test_numbers_of_tables_are_never_shortened(width: int) -> None:
    out = io.StringIO()
    Results(file=out, width=width, soft_wrap=True).print(numbers())
    assert out.getvalue().count("123,456,789,012.25") == 3 and "\u2026" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert (
        max(map(len, lines)) <= max(width, 100) and "class" in lines[1] and len(lines) < 20
    )  # the text can be read


def test_a_pipe_has_room_for_every_table() -> None:
    code = "from flashstep.cli.terminal import OUT; from tests.cli.test_terminal import numbers; OUT.print(numbers())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert "which may be broken a long name" in out and out.count("123,456,789,012.25") == 3
