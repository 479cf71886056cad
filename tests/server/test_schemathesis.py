"""Schemathesis against /openapi.json and a whole server: what the document says is what the server does.

Its checks: no 5xx; statuses, content types, headers, bodies and each event of a stream as documented; bodies that the document
forbids are refused; other methods get 405; keys are asked for where the document says so. ``schemathesis_checks`` adds bodies
that the document allows.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import ROOT, Server

CONTEXT = 160
KEY = "sk-of-a-test"
LEFT_OUT = "positive_data_acceptance"  # refused_for_a_reason stands for it


def schemathesis(
    server: Server, folder: Path, *, examples: int, phases: str, more: tuple[str, ...] = ()
) -> str:
    """Run the command to its end, which must be a success; gives what it printed."""
    options = {
        "--seed": "1",
        "--max-examples": str(examples),
        "--phases": phases,
        "--exclude-checks": LEFT_OUT,
        "--suppress-health-check": "all",
        "--generation-database": "none",
        "--request-timeout": "120",
    }
    ended = subprocess.run(
        [
            Path(sys.executable).parent / "schemathesis",
            "run",
            f"{server.base}/openapi.json",
            "--continue-on-failure",
            "--no-shrink",
            *(word for pair in options.items() for word in pair),
            *more,
        ],
        cwd=folder,
        env=os.environ  # noqa: TID251
        | {"SCHEMATHESIS_HOOKS": "tests.server.schemathesis_checks", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert server.get("/health") == (200, "")
    return ended.stdout


def test_the_server_does_what_its_document_says(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server(step_s=0.0, tokens_per_step=64, max_model_len=CONTEXT, log=tmp_path / "log")
    printed = schemathesis(server, tmp_path, examples=10, phases="coverage,fuzzing")
    assert "refused_for_a_reason" not in printed
    print(printed[printed.index("Test cases:") :])


def test_keys_are_asked_for_where_the_document_says(
    own_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = own_server(
        step_s=0.0,
        tokens_per_step=64,
        max_model_len=CONTEXT,
        log=tmp_path / "log",
        serving={"api_key": (KEY,)},
    )
    more = (
        "--header",
        f"Authorization: Bearer {KEY}",
        "--include-path-regex",
        "models|detokenize|health|ping",
    )
    schemathesis(server, tmp_path, examples=3, phases="fuzzing", more=more)


@pytest.mark.slow
def test_the_document_at_length(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server(step_s=0.0, tokens_per_step=64, max_model_len=CONTEXT, log=tmp_path / "log")
    schemathesis(server, tmp_path, examples=100, phases="fuzzing")
