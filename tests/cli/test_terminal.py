"""Notes about speculation: one line at the end, SYNTHETIC in it where drafts stand by lot, nothing where nothing happened."""

import msgspec
import pytest

from flashstep.cli.terminal import note_acceptance, warn_of_synthetic
from flashstep.config.speculative import SpeculativeOptions
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


def test_synthetic_acceptance_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_synthetic(None)
    warn_of_synthetic(SpeculativeOptions.parse("{}"))
    assert capsys.readouterr().err == ""
    warn_of_synthetic(
        SpeculativeOptions.parse(
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}'
        )
    )
    assert "SYNTHETIC" in capsys.readouterr().err
