"""``flashstep bench decode``, ``probe``, ``chain`` and ``loads`` from the command line: results, refusals, what Ctrl-C leaves."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashstep.bench.ledger import read
from flashstep.cli import main
from flashstep.parallel.loads import read as read_loads

LITTLE = ("--context", "500", "--batch-size", "2", "--steps", "4", "--warm-up", "1")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_decode_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, loads, out = tmp_path / "ledger", tmp_path / "loads", tmp_path / "out.json"
    shown = told(
        capsys, "decode", *LITTLE, "--record-expert-loads", str(loads), "--output-json", str(out),
        "--ledger", str(ledger), "--label", "A", "--round", "3",
    )  # fmt: skip
    assert "4 steps of 2 requests, 500 to" in shown and "1.00 tokens a step" in shown
    assert "balancedness over 8 parts" in shown and "real routing" in shown
    (entry,) = read(ledger)
    assert (entry.kind, entry.label, entry.round, entry.complete) == ("decode", "A", 3, True)
    assert len(json.loads(out.read_text())["steps"]) == 4
    steps = len(read_loads(loads).steps)
    assert f"real; {steps} steps" in (shown := told(capsys, "loads", str(loads), "--parts", "4"))
    assert "over 4 parts" in shown and "busiest experts" in shown
    again = told(capsys, "decode", *LITTLE, "--routing", "recorded", "--expert-loads", str(loads))
    assert "recorded routing" in again


def test_texts_that_are_wrong_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    synthetic = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}'
    main(["bench", "decode", *LITTLE, "--routing", "uniform", "--speculative-config", synthetic])
    shown = capsys.readouterr()
    assert "UNIFORM routing" in shown.err and "SYNTHETIC acceptance" in shown.err
    assert "synthetic acceptance" in shown.out and "uniform routing" in shown.out


def test_probe_and_chain_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "ledger"
    shown = told(capsys, "probe", "--tokens", "20", "--ledger", str(ledger))
    assert "of 19 (" in shown and "ms a token" in shown
    shown = told(
        capsys, "chain", "--shapes", "16/2/64/2", "--tokens", "1", "3", "--replays", "3", "--device", "cpu",
        "--ledger", str(ledger), "--json", str(tmp_path / "chain.json"),
    )  # fmt: skip
    assert "16/2/64/2/softmax x 3" in shown
    probe, chain = read(ledger)
    assert probe.kind == "probe" and len(probe.samples.keys) == 19
    assert chain.samples.column("chain_us").keys() == {"16/2/64/2/softmax x 1", "16/2/64/2/softmax x 3"}
    assert [len(item["us"]) for item in json.loads((tmp_path / "chain.json").read_text())] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (("decode", "--steps", "0", "--context", "0"), ("--context is 0", "--steps is 0")),
        (("decode", "--max-num-seqs", "3", "--fill-cache"), ("--max-num-seqs, --fill-cache: what is measured",)),
        (("decode", "--released", "--model", "x"), ("give --model or --released, not both",)),
        (("decode", "--context", "2000000"), ("positions end at 1048576",)),
        (("forward", "--fill-cache"), ("--fill-cache: what is measured",)),
        (("probe", "--tokens", "2", "--api-key", "k"), ("--tokens is 2", "--api-key is of a server")),
        (
            ("probe", "--url", "http://x", "--routing", "uniform", "--released"),
            ("--routing, --released: the server at --url has its own",),
        ),
        (("probe", "--url", "x"), ("begins with http",)),
        (("chain", "--shapes", "1/2", "--tokens", "0", "--replays", "0"), ("1/2", "--tokens holds 0", "--replays is 0")),
        (("loads", "/none/such", "--parts", "0"), ("there is no such file", "--parts is 0")),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_told_at_once(
    arguments: tuple[str, ...], sentences: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *arguments)
    assert all(sentence in error for sentence in sentences), error


def test_check_refuses_what_makes_texts_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in ((("--routing", "uniform"), "uniform routing"), (("--fill-cache",), "filled cache")):
        assert main(["check", *flags]) == 2
        assert f"{words} changes that on purpose" in capsys.readouterr().err


def test_loads_that_parts_cannot_share_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "decode", *LITTLE, "--record-expert-loads", str(tmp_path / "loads"))
    assert "16 experts of the target cannot be shared" in refused(
        capsys, "loads", str(tmp_path / "loads"), "--parts", "3"
    )


def test_ctrl_c_leaves_a_ledger_and_loads_that_can_be_read(tmp_path: Path) -> None:
    ledger, loads = tmp_path / "ledger", tmp_path / "loads"
    command = [
        sys.executable, "-m", "flashstep", "bench", "decode", "--context", "500", "--steps", "100000",
        "--ledger", str(ledger), "--record-expert-loads", str(loads),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while not loads.exists() or loads.read_bytes().count(b"\n") < 40:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    (entry,) = read(ledger)
    assert not entry.complete and "it was interrupted" in entry.faults and len(entry.samples.keys) > 10
    assert "fault: it was interrupted" in out
    assert len(read_loads(loads).steps) >= 40
