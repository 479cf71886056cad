"""A server that is there to be measured: filled caches, uniform routing, recorded loads. It says so, and eval refuses it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashstep.bench.ledger import read
from flashstep.parallel.loads import read as read_loads
from tests.e2e.serving import ROOT, Served, environment

WRONG = ["uniform routing", "filled cache"]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured") / "loads"


@pytest.fixture(scope="module")
def measured(loads: Path) -> Iterator[Served]:
    served = Served(None, "--fill-cache", "--routing", "uniform", "--record-expert-loads", str(loads))
    yield served
    served.remove()


def flashstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashstep", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(PYTHONPATH=str(ROOT)),
    )


def test_a_long_prompt_is_decoded_and_not_computed(measured: Served) -> None:
    """Any load generator with long prompts measures decoding only: 60,000 tokens would take minutes to compute."""
    prompt = [5 + n % 2000 for n in range(60_000)]
    status, answer = measured.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 60_000
    page = measured.get("/metrics")[1]
    lines = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line[0] != "#"
    }

    def of(name: str, **labels: str) -> float:
        (value,) = [
            value
            for key, value in lines.items()
            if key.startswith(name) and all(f'{k}="{v}"' in key for k, v in labels.items())
        ]
        return value

    assert of("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= 59_999
    assert of("vllm:request_prefill_kv_computed_tokens_sum") == of(
        "vllm:request_success_total", finished_reason="length"
    )
    assert 0 < of("flashstep:expert_balancedness") <= 1
    assert answer["system_fingerprint"].endswith("-falsified")


def test_it_says_that_its_texts_are_wrong(measured: Served) -> None:
    (card,) = measured.get("/v1/models")[1]["data"]
    assert card["falsified_by"] == WRONG
    log = (measured.folder / "log").read_text()
    assert "UNIFORM routing" in log and "FILLED cache" in log


def test_prompt_logprobs_of_a_filled_prompt_are_refused(measured: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 1}
    status, answer = measured.post("/v1/completions", body)
    assert status == 400 and "this server computes none" in answer["error"]["message"]
    assert answer["error"]["param"] == "echo"


def test_a_probe_of_it_is_kept_with_what_it_is(measured: Served, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    done = flashstep("bench", "probe", "--url", measured.url, "--tokens", "30", "--ledger", str(ledger))
    assert done.returncode == 0, done.stderr
    (entry,) = read(ledger)
    assert entry.complete and list(entry.falsified_by) == WRONG
    assert 20 < len(entry.samples.keys) < 30 and sum(entry.samples.column("tokens").values()) <= 29


def test_load_of_it_is_kept_with_what_it_is(measured: Served, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    done = flashstep(
        "bench", "serve", "--url", measured.url, "--num-prompts", "3", "--input-len", "60", "--output-len", "5",
        "--ledger", str(ledger),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(read(ledger)[0].falsified_by) == WRONG


def test_eval_refuses_it(measured: Served, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}) + "\n")
    done = flashstep("eval", str(questions), "--url", measured.url)
    assert done.returncode != 0
    assert "uniform routing" in done.stderr and "filled cache" in done.stderr, done.stderr


def test_loads_are_there_while_it_runs(measured: Served, loads: Path) -> None:
    found = read_loads(loads)
    assert found.header.routing == "uniform" and len(found.steps) > 20
