"""``flashstep bench replay`` and ``traces`` as commands, against a chat server with known times (bench/load/scripted.py)."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flashstep.bench import ledger
from flashstep.bench.load import replayed
from flashstep.bench.load.floor import Floor, measure_floor
from flashstep.cli import main
from tests.bench.load.scripted import FIRST_S, TOKEN_S, ScriptedServer

LANES = ("--max-concurrency", 3)
TINY = Path(__file__).parents[2] / "flashstep" / "tiny"


def turns(number: int, *, output_tokens: int = 30, pause_s: float = 0.01) -> list[dict[str, Any]]:
    every_s = FIRST_S + TOKEN_S * output_tokens + pause_s
    return [
        {
            "at_s": round(every_s * place, 3),
            "service_s": round(every_s - pause_s, 3),
            "input_tokens": 64 * (place + 2) + 9,
            "output_tokens": output_tokens,
            "blocks": list(range(place + 2)),
        }
        for place in range(number)
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [{"session": name, "prefix_tokens": 64, "turns": turns(4)} for name in ("one", "two", "three")]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "flashstep", "bench", *map(str, arguments)]


class Ended(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def floor() -> Floor:
    return asyncio.run(measure_floor())


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, floor: Floor
) -> Callable[..., Ended]:
    """Run the command in this process, with this machine's floor measured once: both would take longer than what is tested."""

    async def measured() -> Floor:
        return floor

    monkeypatch.setattr(replayed, "measure_floor", measured)

    def begun(*arguments: object, status: int = 0) -> Ended:
        try:
            got = main(["bench", *map(str, arguments)])
        except SystemExit as exit:
            got = exit.code
        ended = Ended(*capsys.readouterr())
        assert got == status, ended.stdout + ended.stderr
        return ended

    return begun


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def told(entry: ledger.Entry) -> list[str]:
    """Faults, but that a busy machine made the client late."""
    return [fault for fault in entry.faults if "event loop" not in fault and "of a core" not in fault]


def test_a_replay_measures_what_is_known_and_keeps_it(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    kept, raw = tmp_path / "ledger.jsonl", tmp_path / "raw.jsonl"
    with ScriptedServer() as server:
        words = run(
            "replay", trace, "--url", server.url, "--max-concurrency", 2, "--extra-body", '{"temperature": 1}',
            "--ledger", kept, "--label", "arm", "--round", 3, "--raw", raw, "--seed", 5,
        ).stdout  # fmt: skip
        log = [entry for entry in server.log() if entry["wanted"] > 1]
    assert "12 requests, 0 failed" in words and "P90 interactivity" in words and "fast tail" in words
    (entry,) = ledger.read(kept)
    assert (entry.kind, entry.label, entry.round, entry.seed, entry.complete) == ("replay", "arm", 3, 5, True)
    assert told(entry) == [] and entry.raw == "raw.jsonl"
    assert sorted(entry.samples.keys) == sorted(
        f"{name}/{n}" for name in ("one", "two", "three") for n in range(4)
    )
    # Known times, as the median over requests: half a millisecond of the asyncio clock's grain, and what a busy machine adds
    assert FIRST_S * 1000 <= entry.metrics["ttft_ms"] < FIRST_S * 1000 * 1.2
    assert entry.metrics["itl_ms"] == pytest.approx(TOKEN_S * 1000, rel=0.1)
    # A prompt shares all blocks but its last with the one before: 1 + 2 + ... of 2 + 3 + ...; the server caches by 16 tokens
    assert entry.metrics["theoretical_prefix_hit"] == pytest.approx((2 + 3 + 4) / (2 + 3 + 4 + 5))
    assert entry.metrics["prefix_hit"] == pytest.approx(entry.metrics["theoretical_prefix_hit"], abs=0.12)
    assert all(row["body"]["ignore_eos"] and row["body"]["temperature"] == 1 for row in log)
    assert (entry.subject["url"], entry.subject["model"]) == (server.url, "scripted")
    assert entry.subject["version"] == {"version": "1.0-scripted"} and entry.job
    assert len(records(raw)) == 12 and len(records(raw)[0]["answer"]["chunks"]) >= 30


def test_lengths_come_from_the_server_or_from_a_tokenizer(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    for given in ((), ("--tokenizer", TINY)):
        raw = tmp_path / f"{len(given)}"
        with ScriptedServer() as server:
            run("replay", trace, *LANES, "--url", server.url, "--raw", raw, "--no-cache-bust", *given)
        # the scripted server's template is one token a message; a turn adds an answer, its question takes the last one's place
        extra = {row["turn"]: row["answer"]["prompt_tokens"] - row["input_tokens"] for row in records(raw)}
        assert extra == {0: 2, 1: 4, 2: 5, 3: 6}


def test_two_runs_ask_the_same_and_hit_nothing_of_one_another(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    with ScriptedServer() as server:
        always = (
            "replay",
            trace,
            *LANES,
            "--url",
            server.url,
            "--tokenizer",
            TINY,
            "--ledger",
            tmp_path / "l",
        )
        for given in ((), ("--run-id", "same"), ("--run-id", "same")):
            run(*always, *given)
    one, two, again = ledger.read(tmp_path / "l")
    assert set(one.samples.keys) == set(two.samples.keys)
    assert one.settings["words"] and not ledger.unequal([one, two])
    assert one.metrics["prefix_hit"] == pytest.approx(two.metrics["prefix_hit"], abs=0.03)
    assert again.metrics["prefix_hit"] > 0.9 > 0.8 > two.metrics["prefix_hit"], (
        "the same text once more is all in the cache"
    )


def test_ctrl_c_leaves_valid_files_and_says_so(trace: Path, tmp_path: Path) -> None:
    kept, raw = tmp_path / "ledger.jsonl", tmp_path / "raw.jsonl"
    with ScriptedServer() as server:
        arguments = command(
            "replay", trace, "--url", server.url, "--duration-s", 60, "--ledger", kept, "--raw", raw
        )
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not raw.exists() or raw.read_bytes().count(b"\n") < 6):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    (entry,) = ledger.read(kept)
    assert not entry.complete and entry.faults[0].startswith("interrupted")
    assert "FAULT: interrupted" in out
    rows = records(raw)
    assert len(rows) >= 5 and rows[-1]["answer"]["fault"] in {"interrupted", ""}
    measured = [row["key"] for row in rows if row["phase"] == "measured" and not row["answer"]["fault"]]
    assert list(entry.samples.keys) == measured


def test_ctrl_c_twice_and_sigterm_lose_nothing(trace: Path, tmp_path: Path) -> None:
    for name, signals in {"twice": [signal.SIGINT] * 3, "term": [signal.SIGTERM]}.items():
        kept = tmp_path / f"{name}.jsonl"
        with ScriptedServer() as server:
            arguments = command("replay", trace, "--url", server.url, "--duration-s", 60, "--ledger", kept)
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and sum(row["wanted"] > 1 for row in server.log()) < 6:
                time.sleep(0.05)
            for each in signals:
                process.send_signal(each)
                time.sleep(0.02)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 130, out + err
        (entry,) = ledger.read(kept)
        assert not entry.complete and len(entry.samples.keys) >= 5 and "FAULT: interrupted" in out
        assert entry.raw is not None and len(records(tmp_path / entry.raw)) >= 5, (
            "the raw file is kept without a flag"
        )


def test_a_server_that_dies_ends_in_a_report(trace: Path, tmp_path: Path, run: Callable[..., Ended]) -> None:
    trace.write_text(json.dumps({"session": "one", "turns": turns(30, pause_s=0)}) + "\n")
    with ScriptedServer(lose_after=6) as server:
        ended = run(
            "replay", trace, "--url", server.url, "--tokenizer", TINY, "--ledger", tmp_path / "l", status=1
        )
    (entry,) = ledger.read(tmp_path / "l")
    assert len(entry.samples.keys) == 5 and not entry.complete
    assert entry.failed == 21 and "the server is gone" in ended.stdout and "cut off" in ended.stdout
    assert "5 requests, " in ended.stdout


def test_no_server_is_told_in_a_sentence(trace: Path, run: Callable[..., Ended]) -> None:
    ended = run("replay", trace, "--url", "http://127.0.0.1:1", "--ready-check-timeout-sec", 0.3, status=2)
    assert "still cannot be reached after 0.3 s" in ended.stderr and "Connection refused" in ended.stderr


def test_a_server_that_counts_nothing_needs_a_tokenizer(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    with ScriptedServer(silent_usage=True) as server:
        ended = run("replay", trace, "--url", server.url, status=2)
        assert "give --tokenizer" in ended.stderr
        ended = run(
            "replay", trace, *LANES, "--url", server.url, "--tokenizer", TINY, "--ledger", tmp_path / "l"
        )
    assert "12 of 12 answers came without a count of tokens" in ended.stdout
    (entry,) = ledger.read(tmp_path / "l")
    assert "itl_ms" not in entry.metrics and entry.metrics["ttft_ms"] >= FIRST_S * 1000


def test_too_long_prompts_end_their_sessions_and_the_run_fails(
    trace: Path, run: Callable[..., Ended]
) -> None:
    with ScriptedServer(refuse_over=260) as server:
        ended = run("replay", trace, *LANES, "--url", server.url, "--tokenizer", TINY, status=1)
    assert "6 requests, 3 failed" in ended.stdout and "tokens are too many" in ended.stdout


def spans(log: Sequence[dict[str, Any]], rank: str) -> list[dict[str, Any]]:
    return [row for row in log if row["rank"] == rank]


def test_mirror_sends_to_all_ranks_at_once_and_lag_lets_each_begin_later(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    with ScriptedServer() as server:
        words = run(
            "replay", trace, "--url", server.url, "--tokenizer", TINY, "--dp-ranks", 2, "--lag-s", 0.7,
            "--max-concurrency", 3, "--ledger", tmp_path / "l",
        ).stdout  # fmt: skip
        log = server.log()
    assert len(log) == 2 * 2 * 12
    first = {rank: spans(log, rank) for rank in "01"}
    mirror = [(a, b) for a, b in zip(first["0"][:12], first["1"][:12], strict=True)]
    assert all(a["messages"] == b["messages"] and abs(a["at_s"] - b["at_s"]) < 0.04 for a, b in mirror)
    assert all(a["headers"]["x-request-id"] != b["headers"]["x-request-id"] for a, b in mirror)
    behind = first["1"][12]["at_s"] - first["0"][12]["at_s"]
    assert 0.6 < behind < 1.5, "the second rank begins 0.7 s later"
    assert first["0"][12]["messages"] == first["1"][12]["messages"]
    said = [
        {row["messages"][0]["content"] for row in first["0"][part]} for part in (slice(12), slice(12, None))
    ]
    assert not said[0] & said[1], "what one mode left in the cache is no hit for the next"
    (entry,) = ledger.read(tmp_path / "l")
    assert set(entry.samples.keys) == {
        f"{mode}/{rank}/{name}/{turn}"
        for mode in ("mirror", "lag")
        for rank in "01"
        for name in ("one", "two", "three")
        for turn in range(4)
    }
    # ranks that do not step together lose nothing: the gap is the noise of a second's run
    assert abs(entry.metrics["lockstep_gap"]) < 0.15
    assert entry.settings["modes"] == ["mirror", "lag"] and len(entry.detail["modes"]["lag"]["rank_tps"]) == 2
    assert words.count("rank 1:") == 2 and "throughput lost when ranks lag" in words


def test_one_rank_s_end_and_one_mode_s_end_are_no_other_s(
    trace: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    """With no grace, what is under way at the end of a rank's time is interrupted, and nothing else is."""
    with ScriptedServer() as server:
        run("replay", trace, "--url", server.url, "--tokenizer", TINY, "--dp-ranks", 2, "--lag-s", 0.6, "--duration-s", 1.5,
            "--grace-s", 0, "--raw", tmp_path / "raw", "--ledger", tmp_path / "l", status=0)  # fmt: skip
    rows = records(tmp_path / "raw")
    interrupted = [row for row in rows if row["answer"]["fault"]]
    assert len(interrupted) <= 2 + 2, "at most one of each rank in each mode"
    (entry,) = ledger.read(tmp_path / "l")
    counts = [
        sum(key.startswith(part) for key in entry.samples.keys) for part in ("mirror/", "lag/0", "lag/1")
    ]
    assert counts[0] >= 12 and min(counts[1:]) >= 6 and entry.complete


def test_ranks_may_be_servers_of_their_own(trace: Path, tmp_path: Path, run: Callable[..., Ended]) -> None:
    with ScriptedServer() as one, ScriptedServer() as two:
        run("replay", trace, "--dp-urls", one.url, two.url, "--rank-modes", "mirror", *LANES, "--tokenizer", TINY,
            "--ledger", tmp_path / "l")  # fmt: skip
        assert len(one.log()) == len(two.log()) == 12
    (entry,) = ledger.read(tmp_path / "l")
    assert "lockstep_gap" not in entry.metrics and entry.subject["url"] == [one.url, two.url]


def test_all_wrong_flags_are_told_at_once(trace: Path, tmp_path: Path, run: Callable[..., Ended]) -> None:
    (tmp_path / "there").write_text("")
    ended = run(
        "replay", trace, "--dp-urls", "http://a", "--dp-ranks", 2, "--max-concurrency", 0, "--duration-s", -1,
        "--start-from", 0.9, "--start-to", 0.1, "--extra-body", '{"model": 1}', "--raw", tmp_path / "there",
        "--no-cache-bust", "--run-id", "x", "--timeout-s", "nan", status=2,
    )  # fmt: skip
    for told in (
        "--dp-urls names the ranks' servers: leave --url and --dp-ranks out",
        "one rank has nobody to be compared with",
        "--max-concurrency is 0; it must be at least 1",
        "--duration-s is -1.0; it must be above 0",
        "--timeout-s is nan; it must be above 0",
        "must be shares from 0 to 1",
        "--extra-body has model, which the plan sets",
        "which is there already",
        "--no-cache-bust turns off",
    ):
        assert told in ended.stderr
    ended = run("replay", trace, "--rank-modes", "lag", status=2)
    assert "--rank-modes and --lag-s are for ranks" in ended.stderr


def test_traces_are_made_told_and_converted(tmp_path: Path, run: Callable[..., Ended]) -> None:
    made = run(
        "traces",
        "--sessions",
        5,
        "--scale",
        0.05,
        "--most-turns",
        6,
        "--out",
        tmp_path / "w",
        "--json",
        tmp_path / "j",
    )
    assert "5 sessions with" in made.stdout and "theoretical prefix hit" in made.stdout
    assert len(list((tmp_path / "w").glob("*.json"))) == 5
    told = json.loads((tmp_path / "j").read_text())
    assert told["sessions"] == 5 and len(told["digest"]) == 16
    run("traces", "--read", tmp_path / "w", "--out", tmp_path / "ours", "--form", "jsonl")
    again = run("traces", "--read", tmp_path / "ours")
    assert again.stdout.splitlines()[0].startswith(made.stdout.splitlines()[0].partition(" (")[0])


def test_traces_tells_what_it_cannot_do(tmp_path: Path, run: Callable[..., Ended]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    wrong = run(
        "traces", "--read", tmp_path, "--seed", 3, "--out", tmp_path / "full", "--most-turns", 1, status=2
    ).stderr
    assert "--seed, --most-turns: what is read with --read is not drawn" in wrong
    assert "which has something in it" in wrong and "--most-turns is 1" in wrong
    wrong = run(
        "traces", "--tokenizer", TINY, "--scale", 0, "--sessions", 0, "--context-tokens", 10, status=2
    ).stderr
    for told in (
        "--tokenizer is for real messages",
        "--scale is 0.0",
        "--sessions is 0",
        "--context-tokens is 10",
    ):
        assert told in wrong


def test_ctrl_c_while_it_waits_for_a_server_ends_it(trace: Path) -> None:
    process = subprocess.Popen(
        command("replay", trace, "--url", "http://127.0.0.1:1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None and "waiting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
