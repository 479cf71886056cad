"""The commands without a server, as processes: what the embedded model says to a shell, check on others' weights."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import PATIENCE_S, ROOT, TINY_FLAGS, TRAINED, UNTRAINED, environment
from tests.oracle.golden import VECTORS, needs_vectors

trained = pytest.mark.skipif(not TRAINED, reason=UNTRAINED)


def flashstep(*arguments: str, cwd: Path, typed: str = "") -> tuple[str, str]:
    """Standard output and standard error of a command that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "flashstep", *arguments],
        cwd=cwd,
        env=environment(PYTHONPATH=str(ROOT)),
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_generate_says_the_same_alone_and_among_others(tmp_path: Path) -> None:
    asked = ("--max-tokens", "6", "--ignore-eos", *TINY_FLAGS)
    alone, _ = flashstep("generate", "The capital of France", *asked, cwd=tmp_path)
    piped, _ = flashstep("generate", *asked, cwd=tmp_path, typed="The capital of France\n")
    together, _ = flashstep("generate", "Once", "The capital of France", "two and two", *asked, cwd=tmp_path)
    assert alone.strip() and alone == piped
    assert alone.strip() in together


@trained
def test_chat_over_a_pipe_remembers(tmp_path: Path) -> None:
    shown, _ = flashstep("chat", cwd=tmp_path, typed="What is 12 + 30?\nWhat is the capital of France?\n")
    assert "42" in shown and "Paris" in shown and "think>" not in shown


@trained
def test_ctrl_c_ends_an_answer_and_chat_goes_on(tmp_path: Path) -> None:
    """While a long answer comes; the next message is answered as if nothing had been."""
    chat = subprocess.Popen(
        [sys.executable, "-u", "-m", "flashstep", "chat", "--max-tokens", "900", "--temperature", "1"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert chat.stdin is not None and chat.stdout is not None
    with chat:
        chat.stdin.write("Tell me a story about a fox and a crow, and count to one hundred\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        shown, notes = chat.communicate("What is 12 + 30?\n", timeout=PATIENCE_S)
    assert chat.returncode == 0 and "Traceback" not in notes, notes
    assert "[stopped]" in shown and "42" in shown.split("[stopped]")[1]


@needs_vectors
def test_check_on_a_checkpoint_of_others(tmp_path: Path) -> None:
    shown, notes = flashstep("check", str(VECTORS / "a_base" / "ckpt"), cwd=tmp_path)
    assert "all equal bit for bit" in shown
    assert "oracle" in notes  # long work says what it does


def test_budget_of_the_released_model(tmp_path: Path) -> None:
    shown, _ = flashstep("budget", "--released", cwd=tmp_path)
    assert "890 bytes a token" in shown
