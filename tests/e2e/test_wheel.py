"""The whole works from a wheel, installed into a fresh environment, run where no checkout is."""

import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.serving import PATIENCE_S, ROOT, TINY, TINY_FLAGS, TRAINED, UNTRAINED, environment

SOURCES = ("flashstep", "oracle", "train", "pyproject.toml", "README.md", "LICENSE")
MAX_MODEL_BYTES = 20_000_000


def run(*command: str | Path, cwd: Path) -> str:
    """Its output, stdout and stderr; fails with it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and nothing else of ours; what flashstep depends on is seen, not installed again."""
    work = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:  # a copy: a build in the checkout would pick up what earlier ones left
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, work / "src" / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", work / "dist", work / "src", cwd=work)
    shutil.rmtree(work / "src")
    (wheel,) = (work / "dist").glob("flashstep-*.whl")
    home = work / "home"
    venv.create(home, with_pip=False)
    (packages,) = (home / "lib").glob("python3*/site-packages")
    # a plain path: the .pth files there, among them that of a flashstep installed for editing, are not read
    (packages / "seen.pth").write_text("\n".join(site.getsitepackages()))
    run(*pip, "--python", home / "bin" / "python", "install", "--no-deps", wheel, cwd=work)
    return home


def test_what_is_in_it(installed: Path) -> None:
    where = run(
        installed / "bin" / "python",
        "-c",
        "import flashstep, oracle; print(flashstep.__file__)",
        cwd=installed,
    )
    package = Path(where.strip()).parent
    assert package.is_relative_to(installed)
    files = {file.name: file.stat().st_size for file in (package / "tiny").iterdir()}
    assert files == {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert sum(files.values()) < MAX_MODEL_BYTES
    pages = {file.name for file in (package / "server" / "page").iterdir()}
    assert pages == {"index.html", "page.css", "page.js", "icon.svg"}
    sets = {file.name for file in (package / "bench" / "quality" / "questions").iterdir()}
    assert sets == {"word-problems.jsonl", "recall.jsonl", "calls.jsonl"}
    assert (package / "bench" / "report" / "page.css").is_file()
    assert not list(installed.glob("lib/python3*/site-packages/tests"))


def test_its_commands_run_anywhere(installed: Path, tmp_path: Path) -> None:
    flashstep = installed / "bin" / "flashstep"
    assert "890 bytes a token" in run(flashstep, "budget", "--released", cwd=tmp_path)
    assert "bytes a token" in run(flashstep, "budget", cwd=tmp_path)
    said = run(
        flashstep, "generate", "One and two", "--max-tokens", "3", "--ignore-eos", *TINY_FLAGS, cwd=tmp_path
    )
    assert said.splitlines()[-1].strip()


@pytest.mark.skipif(not TRAINED, reason=UNTRAINED)
def test_it_checks_its_own_model(installed: Path, tmp_path: Path) -> None:
    """The engine against the oracle, both from the wheel, on the weights that the wheel brings."""
    shown = run(installed / "bin" / "flashstep", "check", cwd=tmp_path)
    assert "all equal bit for bit" in shown
