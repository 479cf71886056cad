"""``flashstep bench serve`` against a real ``flashstep serve`` that speculates: what both count agrees."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashstep.bench import ledger
from tests.e2e.serving import PATIENCE_S, ROOT, Served, environment

DRAFTS = '{"method":"dspark","num_speculative_tokens":3,"draft_sample_method":"probabilistic"}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(None, "--speculative-config", DRAFTS)
    yield server
    server.remove()


def run(served: Served, folder: Path, *flags: str) -> tuple[str, ledger.Entry]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flashstep",
            "bench",
            "serve",
            "--url",
            served.url,
            "--ledger",
            str(folder / "l"),
            *flags,
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = ledger.read(folder / "l")
    return done.stdout, entry


def test_lengths_are_as_wished_and_the_servers_counts_agree(served: Served, tmp_path: Path) -> None:
    out, entry = run(
        served, tmp_path, "--num-prompts", "6", "--max-concurrency", "2", "--input-len", "70:120",
        "--prefix-len", "20", "--output-len", "16:24", "--seed", "1",
    )  # fmt: skip
    lengths, answers = entry.samples.column("input_tokens"), entry.samples.column("output_tokens")
    assert len(lengths) == 6 and all(70 <= tokens <= 120 for tokens in lengths.values())
    assert all(16 <= tokens <= 24 for tokens in answers.values())
    wrong = [fault for fault in entry.faults if "event loop" not in fault]  # a busy machine's
    assert not wrong, wrong
    counted = entry.detail["counted"]
    assert counted["prompt_tokens"] == sum(lengths.values())
    assert counted["generation_tokens"] == sum(answers.values())
    assert counted["prefix_cache_hits"] == sum(entry.samples.column("cached_tokens").values())
    assert 1 <= entry.metrics["acceptance_length"] <= 4
    assert len(entry.detail["acceptance_by_position"]) == 3
    assert "acceptance, by /metrics" in out and "SYNTHETIC" not in out and not entry.falsified_by
    assert entry.detail["gaps"]["tokens_known_from"] == {"events": 6}
    assert entry.detail["gaps"]["tokens_a_chunk"] > 1, "drafts that stood came in one chunk"
    assert entry.subject["usage"] == "each event" and entry.subject["version"]["version"]


def test_turns_go_on_from_live_answers_and_hit_the_cache(served: Served, tmp_path: Path) -> None:
    _, entry = run(
        served, tmp_path, "--endpoint", "completions", "--num-prompts", "2", "--turns", "3", "--history", "live",
        "--input-len", "100", "--output-len", "12", "--request-rate", "20", "--seed", "3", "--think-time-ms", "10:20",
    )  # fmt: skip
    lengths, cached = entry.samples.column("input_tokens"), entry.samples.column("cached_tokens")
    for session in "01":
        first, second, third = (f"{session}/{turn}" for turn in range(3))
        assert lengths[first] == 100 < lengths[second] < lengths[third]
        assert cached[second] >= 64 and cached[third] >= 96


def test_a_second_run_with_the_same_seed_is_told_that_its_prompts_were_cached(
    served: Served, tmp_path: Path
) -> None:
    flags = ("--num-prompts", "2", "--input-len", "150", "--output-len", "2", "--seed", "4")
    for place, expected in (("a", False), ("b", True)):
        (tmp_path / place).mkdir()
        _, entry = run(served, tmp_path / place, *flags)
        assert any("prefix cache already" in fault for fault in entry.faults) is expected, entry.faults
