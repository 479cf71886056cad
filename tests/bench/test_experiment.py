"""Experiments of real processes: the order, plans, what fails, what is interrupted, and going on from there."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from flashstep.bench.arms import entries_of, is_ledger
from flashstep.bench.experiment import argv, plan_beside, read_plan
from flashstep.bench.ledger import LedgerError, append, read
from flashstep.bench.stats.design import order
from flashstep.cli import main
from tests.bench.entries import run
from tests.bench.experiments import plan
from tests.e2e.serving import await_that

ROOT = Path(__file__).parents[2]
ARM = f"{sys.executable} -m tests.bench.arm"


class Done(NamedTuple):
    stdout: str
    stderr: str


Compare = Callable[..., Done]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compare:
    """``flashstep bench compare`` in this process; the arms are processes."""
    monkeypatch.chdir(ROOT)

    def run_it(*arguments: str | Path, expect: int = 0) -> Done:
        capsys.readouterr()
        code = main(["bench", "compare", *map(str, arguments)])
        done = Done(*capsys.readouterr())
        assert code == expect, done
        return done

    return run_it


def words(a: str, b: str, *, ledger: Path) -> list[str]:
    """Behind ``flashstep bench compare``."""
    return [a, b, "--metric", "output_tps", "--ledger", str(ledger)]


def comparing(command: Sequence[str], *, began: Path) -> subprocess.Popen[str]:
    """``flashstep bench compare`` as a process, at the moment when the arm that tells so has begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flashstep", "bench", "compare", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    await_that(began.exists)
    return process


def test_two_commands_become_a_claim(tmp_path: Path, compare: Compare) -> None:
    """A B B A ..., one paragraph, JSON, both pictures, and rows that anyone can read again."""
    ledger, out = tmp_path / "x.jsonl", tmp_path / "claim.json"
    done = compare(
        f"{ARM} 100", f"{ARM} 107", "--control", "A", "--metric", "output_tps", "--ledger", ledger, "--json", out,
        "--svg", tmp_path / "x.svg", "--png", tmp_path / "x.png", "--margin", "1%",
    )  # fmt: skip
    entries = read(ledger)
    assert [(e.round, e.label) for e in entries] == order(["A", "B", "control"], rounds=6)
    assert "B's output throughput is higher than A's by 7 tokens/s (+6.93%), which is better" in done.stdout
    assert "B is not worse than A by 1.01 tokens/s or more" in done.stdout
    assert "(control) differs by +0 tokens/s" in done.stdout
    digest = hashlib.sha256(plan_beside(ledger).read_bytes()).hexdigest()
    assert {e.plan for e in entries} == {digest} and digest in done.stderr and digest[:12] in done.stdout
    claim = json.loads(out.read_text())
    assert claim["says"] == "different" and claim["plan"] == digest and claim["not_inferior"] is True
    assert (tmp_path / "x.svg").read_text().startswith("<?xml") and (tmp_path / "x.png").stat().st_size > 5000
    again = compare(f"{ledger}:A", f"{ledger}:B", "--control", f"{ledger}:control")
    assert again.stdout.split("\n")[0] == done.stdout.split("\n")[0], "the rows alone give the same claim"
    for arms in (["A", "B"], ["B", "A"], ["A", "control"], ["A", "A"]):
        other = compare(*(f"{ledger}:{arm}" for arm in arms), expect=1)
        assert "No claim" in other.stdout and "the plan has an arm" in other.stdout.lower(), arms


def test_a_failing_arm_is_shown_and_the_experiment_goes_on_from_there(
    tmp_path: Path, compare: Compare
) -> None:
    ledger, fails = tmp_path / "x.jsonl", tmp_path / "fails"
    fails.write_text("2")
    command = [f"{ARM} 100", f"{ARM} 107 --fail-round {fails}", "--metric", "output_tps", "--ledger", ledger]
    failed = compare(*command, expect=2)
    assert (
        "round 2, arm B: " in failed.stderr and f"107 --fail-round {fails} --ledger {ledger}" in failed.stderr
    )
    assert "exit code 3" in failed.stderr and "| RuntimeError: the [red]server[/red] died" in failed.stderr
    before = read(ledger)
    assert len(before) == 5
    fails.unlink()
    done = compare(*command)
    assert "higher than A's by 7" in done.stdout and read(ledger)[:5] == before and len(read(ledger)) == 12
    assert "which is better" in compare(*command).stdout and len(read(ledger)) == 12, (
        "nothing is due any more"
    )


def test_a_whole_run_is_not_repeated_for_its_exit_code(tmp_path: Path, compare: Compare) -> None:
    """It says that it failed and kept a whole entry: that is told, and the entry stands."""
    ledger = tmp_path / "x.jsonl"
    command = [f"{ARM} 100", f"{ARM} 107 --exit 1", "--metric", "output_tps", "--ledger", ledger]
    failed = compare(*command, expect=2)
    assert (
        "exit code 1" in failed.stderr
        and "its entry is complete and stands: it is not run again" in failed.stderr
    )
    assert [e.label for e in read(ledger)] == ["A", "B"]
    compare(*command, expect=2)
    assert [(e.round, e.label) for e in read(ledger)] == [(0, "A"), (0, "B"), (1, "B")]


def test_one_experiment_runs_once_at_a_time(tmp_path: Path, compare: Compare) -> None:
    ledger, began = tmp_path / "x.jsonl", tmp_path / "began"
    command = words(f"{ARM} 100 --wait 30 --began {began}", f"{ARM} 107", ledger=ledger)
    first = comparing(command, began=began)
    try:
        second = compare(*command, expect=2)
        assert (
            "another flashstep bench compare, or a run that one left behind, is at the experiment of "
            f"{plan_beside(ledger)}" in second.stderr
        )
        stands = plan_beside(ledger).read_bytes()
        other = compare(*command, "--rounds", "8", expect=2)
        assert "another flashstep bench compare" in other.stderr, "nor is its plan written anew"
        assert plan_beside(ledger).read_bytes() == stands
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    assert [(e.label, e.complete) for e in read(ledger)] == [("A", False)]


def test_a_command_that_keeps_nothing(tmp_path: Path, compare: Compare) -> None:
    done = compare(
        f"{ARM} 1", f"{ARM} 1 --silent", "--metric", "output_tps", "--ledger", tmp_path / "x.jsonl", expect=2
    )
    assert "it ended well and kept no entry; is it a flashstep bench or eval command?" in done.stderr


def test_a_run_that_outlives_its_compare_is_not_measured_beside(tmp_path: Path, compare: Compare) -> None:
    """SIGKILL of compare leaves the arm, which has the lock too: the same command again is refused until it has ended."""
    ledger, began = tmp_path / "x.jsonl", tmp_path / "began"
    command = words(f"{ARM} 100 --wait 10 --began {began}", f"{ARM} 107", ledger=ledger)
    process = comparing(command, began=began)
    process.kill()
    process.wait()
    assert "a run that one left behind" in compare(*command, expect=2).stderr
    await_that(lambda: ledger.exists() and bool(read(ledger)))
    assert [(e.round, e.label) for e in read(ledger)] == [(0, "A")]


def test_no_output_takes_the_place_of_the_plan(tmp_path: Path, compare: Compare) -> None:
    ledger = tmp_path / "x.jsonl"
    arms = [f"{ARM} 100", f"{ARM} 107", "--metric", "output_tps"]
    told = compare(*arms, "--ledger", ledger, "--json", plan_beside(ledger), expect=2).stderr
    assert "the plan beside --ledger is, too" in told and not ledger.exists()
    compare(*arms, "--ledger", ledger)
    planned = plan_beside(ledger).read_bytes()
    read_again = [f"{ledger}:A", f"{ledger}:B", "--json", plan_beside(ledger)]
    assert "the plan of A is, too" in compare(*read_again, expect=2).stderr
    assert plan_beside(ledger).read_bytes() == planned


def test_a_secret_in_an_arm_is_told_and_not_shown(tmp_path: Path, compare: Compare) -> None:
    arm = "flashstep bench serve --url http://127.0.0.1:1 --api-key hush"
    told = compare(arm, arm, "--metric", "ttft_ms", "--ledger", tmp_path / "x.jsonl", "--plan-only").stderr
    assert "arm A holds what may be a secret" in told and "hush" not in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_keeps_what_ran(tmp_path: Path, number: signal.Signals, compare: Compare) -> None:
    """The run is told, keeps what it has, and is run again later; no process stays."""
    ledger, began = tmp_path / "x.jsonl", tmp_path / "began"
    command = words(f"{ARM} 100", f"{ARM} 107 --wait 30 --began {began}", ledger=ledger)
    process = comparing(command, began=began)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert [(e.label, e.complete) for e in read(ledger)] == [("A", True), ("B", False)]
    assert "No claim about output throughput." in out and "interrupted" in out
    assert "the same command goes on from here" in err
    alive = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(ledger) not in alive
    left = compare(*command, "--plan-only").stdout.splitlines()
    assert len(left) == 11 and "--label B --round 0" in left[0], "what ended early is due again"


def test_all_that_is_wrong_at_once(tmp_path: Path, compare: Compare) -> None:
    done = compare(
        f"{ARM} 1 --label x", "no-such-program bench probe", "--rounds", "5", "--margin", "much", expect=2
    )
    for said in (
        "--ledger is missing",
        "there is no metric ''",
        "5 rounds; 2 arms are balanced in 2, 4, 6, ... rounds",
        "the margin is 'much'",
        "--label in",
        "there is no program 'no-such-program'",
    ):
        assert said in done.stderr
    few = compare(
        f"{ARM} 1",
        f"{ARM} 2",
        "--metric",
        "output_tps",
        "--rounds",
        "4",
        "--ledger",
        tmp_path / "x",
        expect=2,
    )
    assert "--rounds is 4: no result could reach the level 0.05; it takes 6" in few.stderr
    mixed = compare(f"{ARM} 1", tmp_path / "x.jsonl", expect=2)
    assert "one arm is a ledger and the other a command" in mixed.stderr


def test_a_plan_cannot_change_under_its_runs(tmp_path: Path, compare: Compare) -> None:
    ledger = tmp_path / "x.jsonl"
    command = [f"{ARM} 100", f"{ARM} 107", "--metric", "output_tps", "--ledger", ledger]
    planned = compare(*command, "--rounds", "6", "--margin", "1%", "--plan-only")
    lines = planned.stdout.splitlines()
    assert len(lines) == 12 and not ledger.exists()
    digest = hashlib.sha256(plan_beside(ledger).read_bytes()).hexdigest()
    assert lines[1] == shlex.join(
        [
            *shlex.split(f"{ARM} 107"),
            "--ledger",
            str(ledger),
            "--label",
            "B",
            "--round",
            "0",
            "--plan",
            digest,
        ]
    )
    compare(*command, "--rounds", "8", "--plan-only")
    assert read_plan(plan_beside(ledger)).plan.rounds == 8, "nothing ran under the first"
    again = compare(*command, "--rounds", "6", "--margin", "1%", "--plan-only").stdout.splitlines()
    for line in again:
        subprocess.run(shlex.split(line), cwd=ROOT, check=True, capture_output=True)
    other = compare(*command, "--rounds", "8", "--margin", "2%", expect=2)
    assert "margin is '1%' there and '2%' here; rounds is 6 there and 8 here" in other.stderr
    done = compare(f"{ledger}:A", f"{ledger}:B")
    assert (
        "which is better" in done.stdout
        and "by 1.01 tokens/s or more, the margin that was stated" in done.stdout
    )
    late = compare(f"{ledger}:A", f"{ledger}:B", "--margin", "5%", "--alpha", "0.1", expect=2)
    assert "--alpha 0.1, and the plan says 0.05; --margin 5%, and the plan says '1%'" in late.stderr
    plan_beside(ledger).unlink()
    refused = compare(*command, "--margin", "5%", expect=2)
    assert "has entries and no plan of theirs" in refused.stderr
    lost = compare(f"{ledger}:A", f"{ledger}:B", "--metric", "output_tps", expect=1)
    assert "No claim" in lost.stdout and "they are judged by their plan, or not at all" in lost.stdout


def test_arms_from_ledgers(tmp_path: Path, compare: Compare) -> None:
    ledger, odd = tmp_path / "x.jsonl", tmp_path / "a:b.jsonl"
    for label in ("base", "new"):
        for r in range(2):
            append(ledger, run(label, r, 1.0))
    append(odd, run("only", 0, 1.0))
    assert len(entries_of(f"{ledger}:base")) == 2 and len(entries_of(str(odd))) == 1
    assert is_ledger(str(odd)) and is_ledger(f"{odd}:only") and not is_ledger("flashstep bench probe")
    with pytest.raises(LedgerError, match=re.escape(f"say which: {ledger}:base, {ledger}:new")):
        entries_of(str(ledger))
    with pytest.raises(LedgerError, match="no entries of arm 'old'; it has base, new"):
        entries_of(f"{ledger}:old")
    with pytest.raises(LedgerError, match="there is no such ledger"):
        entries_of(str(tmp_path / "none.jsonl"))
    done = compare(f"{ledger}:base", f"{ledger}:new", expect=2)
    assert "--metric is missing: say which one the claim is about; the runs have output_tps" in done.stderr
    done = compare(f"{ledger}:base", f"{ledger}:new", "--metric", "output_tps", expect=1)
    assert "No claim" in done.stdout and "the smallest p there is is 0.5" in done.stdout.replace("\n", " ")
    wrong = compare(f"{ledger}:base", f"{ledger}:new", "--rounds", "6", "--ledger", tmp_path / "y", expect=2)
    assert "--rounds, --ledger: the arms are ledgers, and nothing is run" in wrong.stderr


def test_a_plan_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.plan.json"
    for text in ("", "{}", '{"metric": 3}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="is no plan"):
            read_plan(file)
    plain = msgspec.to_builtins(plan(5, alpha=0.9)) | {"arms": {"B": "b", "A": "a"}, "format": 1}
    file.write_bytes(msgspec.json.encode(plain))
    with pytest.raises(ValueError) as wrong:
        read_plan(file)
    for said in (
        "format 1",
        "its arms are B, A;",
        "the level is 0.9; it must be",
        "5 rounds; 2 arms are balanced",
    ):
        assert said in str(wrong.value)


def test_flashstep_is_this_one_where_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert argv("flashstep bench probe") == [sys.executable, "-m", "flashstep", "bench", "probe"]
    with pytest.raises(ValueError, match="each round is one run of each arm"):
        argv("flashstep eval recall --runs 4")
    with pytest.raises(ValueError, match="cannot be read"):
        argv("flashstep 'bench")
