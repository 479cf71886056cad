"""The whole works from a wheel installed outside the checkout: code, embedded model, command line."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("flashstep", "oracle", "train", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},  # noqa: TID251 - what a child process inherits, in a test
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and nothing of the checkout."""
    work = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:  # a copy: a build in the checkout would pick up leftovers of earlier ones
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, work / "src" / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        work / "dist",
        work / "src",
        cwd=work,
    )
    (wheel,) = (work / "dist").glob("flashstep-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site")
    return work / "site"


def test_the_embedded_model_is_in_the_wheel(site: Path) -> None:
    names = {file.name for file in (ROOT / "flashstep" / "tiny").iterdir()}
    assert names == {file.name for file in (site / "flashstep" / "tiny").iterdir()}


def test_generate_runs_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    where = "import flashstep; print(flashstep.__file__)"
    assert run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site)).strip().startswith(str(site))
    command = (
        sys.executable,
        "-m",
        "flashstep",
        "generate",
        "One and two",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
    )
    assert run(*command, cwd=tmp_path, PYTHONPATH=str(site)).strip()
