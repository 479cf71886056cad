"""The README's session, run as a new user would: its code blocks against ``flashstep serve``, its printed lines compared."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SESSION = (
    ROOT.joinpath("README.md")
    .read_text(encoding="utf-8")
    .partition("## As a new user")[2]
    .partition("\n## ")[0]
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    command = [sys.executable, "-m", "flashstep", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)/v1", process.stdout.readline())
        assert found, "the server did not start"
        yield found[1]
        process.terminate()


@pytest.mark.slow
def test_the_readmes_session_prints_what_it_says(port: str) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", SESSION, flags=re.DOTALL)
    code = "\n".join(block for language, block in blocks if language == "python")
    printed = [block for language, block in blocks if not language]
    assert "127.0.0.1:8000" in code and len(printed) == 1
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed[0]
