"""What the engine's own measurements keep in a ledger: whole runs, and what there is of one that was interrupted."""

import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from flashstep.bench.ledger import read
from flashstep.cli import main
from tests.e2e.serving import ROOT, await_that, environment, little_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = little_model(tmp_path_factory.mktemp("model") / "little")
    return ["--model", str(folder), "--load-format", "dummy"]


def test_forward_keeps_every_timed_run(tmp_path: Path, model: list[str]) -> None:
    ledger = tmp_path / "l.jsonl"
    flags = ["--repeats", "3", "--ledger", str(ledger), "--label", "A", "--round", "2", "--seed", "3"]
    assert main(["bench", "forward", "32@64", "2*16@16", *model, *flags]) == 0
    (entry,) = read(ledger)
    assert (entry.kind, entry.label, entry.round, entry.complete) == ("forward", "A", 2, True)
    assert entry.samples.keys == ("0", "1", "2") and set(entry.samples.columns) == {
        "step_us 0 1*32@64",
        "step_us 1 2*16@16",
    }
    assert entry.seed == 3 and entry.settings["cases"] == ["32@64", "2*16@16"] and entry.falsified_by == ()
    assert entry.subject["engine"] == {"--load-format": "dummy", "--seed": "3"}
    assert entry.metrics == {} and [case["us"] > 0 for case in entry.detail["cases"]] == [True, True]
    assert main(["bench", "forward", "32@64", *model, *flags]) == 0
    alone = read(ledger)[-1]
    assert statistics.median(alone.samples.column("step_us").values()) == alone.metrics["step_us"]


def test_latency_keeps_every_step(tmp_path: Path, model: list[str]) -> None:
    ledger = tmp_path / "l.jsonl"
    flags = ["--num-iters", "2", "--num-iters-warmup", "1", "--output-len", "6", "--batch-size", "2"]
    assert main(["bench", "latency", *flags, *model, "--ledger", str(ledger)]) == 0
    (entry,) = read(ledger)
    assert entry.kind == "latency" and entry.complete and entry.settings["batch_size"] == 2
    assert sum(entry.samples.column("tokens").values()) == 2 * 2 * 5
    assert {key.split("/")[0] for key in entry.samples.keys} == {"0", "1"}
    assert entry.metrics["step_us"] > 0 and entry.metrics["acceptance_length"] == 1
    assert entry.metrics["output_tps"] == pytest.approx(2 * entry.metrics["median_interactivity_tps"])


@pytest.mark.parametrize("what", ["latency", "forward"])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, model: list[str], what: str) -> None:
    ledger = tmp_path / "l.jsonl"
    flags = ["--num-iters", "100000", "--num-iters-warmup", "0"] if what == "latency" else ["32@64"] * 5000
    command = [sys.executable, "-m", "flashstep", "bench", what, *flags, *model, "--ledger", str(ledger)]
    told = tmp_path / "told"
    with told.open("w") as file:
        process = subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)), stderr=file, stdout=file)
        await_that(lambda: told.read_text().count("\n") > 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, told.read_text()
    (entry,) = read(ledger)
    assert not entry.complete and entry.faults[0].startswith("it was interrupted behind ")
    assert entry.samples.keys and (what == "forward" or entry.metrics["step_us"] > 0)
    assert "fault: it was interrupted" in told.read_text()


def test_a_ledger_that_cannot_be_is_told_first(
    tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for what in (["forward"], ["latency"], ["pdl"]):
        assert (
            main(["bench", *what, *(model if what != ["pdl"] else []), "--ledger", "/nowhere/l.jsonl"]) == 2
        )
        assert "--ledger is /nowhere/l.jsonl; there is no folder /nowhere" in capsys.readouterr().err
