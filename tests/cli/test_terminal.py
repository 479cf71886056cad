"""Notes about speculation: one line at the end, SYNTHETIC in it where drafts stand by lot, nothing where nothing happened."""

from pathlib import Path

import msgspec
import pytest

from flashstep.cli.terminal import note_acceptance, warn_of_falsified
from flashstep.config.engine_options import EngineOptions
from flashstep.request import Acceptance

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
