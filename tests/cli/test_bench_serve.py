"""``flashstep bench serve`` as a user runs it, against a server that is none of ours: figures, files, and every bad end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashstep.bench import ledger
from flashstep.bench.load.drive import Record
from flashstep.bench.load.raw import Beginning
from tests.bench.load.stub import ROOT, Stub

PATIENCE_S = 60


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with Stub() as started:
        yield started


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "flashstep", "bench", "serve", "--no-ignore-eos", *flags]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def small(stub: Stub, folder: Path, *flags: str, number: int = 8) -> list[str]:
    """Flags of a short run that is kept."""
    plain = ["--url", stub.url, "--num-prompts", str(number), "--input-len", "20:40", "--output-len", "4:12"]
    return [*plain, "--max-concurrency", "4", "--ledger", str(folder / "ledger.jsonl"), *flags]


def bad(behave: str, *, first: int = 0) -> tuple[str, str]:
    return "--extra-body", json.dumps({"metadata": {"behave": behave, "from": first}})


def kept(folder: Path) -> tuple[ledger.Entry, list[Record]]:
    """The only entry, and the records of its raw file; every line of both is whole."""
    (entry,) = ledger.read(folder / "ledger.jsonl")
    assert entry.raw is not None
    return entry, records(folder / entry.raw)


def records(file: Path) -> list[Record]:
    lines = file.read_bytes().splitlines()
    msgspec.json.decode(lines[0], type=Beginning)
    return [msgspec.json.decode(line, type=Record) for line in lines[1:]]


def test_a_run_against_a_strange_server_is_whole(stub: Stub, tmp_path: Path) -> None:
    done = run(*small(stub, tmp_path, "--goodput", "ttft:5000", "tpot:1000", "--probe-request-rate", "40"))
    assert done.returncode == 0, done.stderr
    assert "8 of 8 requests answered" in done.stdout and "this client's floor:" in done.stdout
    assert "probes:" in done.stdout
    entry, raw = kept(tmp_path)
    assert entry.complete and entry.kind == "serve" and entry.seed == 0
    assert entry.subject["model"] == "stub-1" and entry.subject["usage"] == "at the end"
    assert set(entry.samples.keys) == {str(n) for n in range(8)}
    assert all(20 <= tokens <= 40 for tokens in entry.samples.column("input_tokens").values())
    assert all(4 <= tokens <= 12 for tokens in entry.samples.column("output_tokens").values())
    assert not any("lengths" in fault or "failed" in fault for fault in entry.faults), entry.faults
    assert entry.metrics["goodput"] == entry.metrics["request_rate"]
    assert entry.detail["gaps"]["tokens_known_from"] == {"one a chunk": 8}
    streams = [record.stream for record in raw]
    assert streams.count("run") == 8 and streams.count("warm-up") == 1 and streams.count("probe") >= 1
    for record in raw:
        assert (
            len([chunk for chunk in record.answered.chunks if chunk.is_content])
            == record.answered.output_tokens
        )


def test_completions_and_a_rate(stub: Stub, tmp_path: Path) -> None:
    flags = small(stub, tmp_path, "--endpoint", "completions", "--request-rate", "40", "--burstiness", "0.5")
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    entry, _ = kept(tmp_path)
    assert all(20 <= tokens <= 40 for tokens in entry.samples.column("input_tokens").values())


def test_the_same_seed_makes_the_same_plan_and_the_same_bodies(stub: Stub, tmp_path: Path) -> None:
    flags = [
        "--url",
        stub.url,
        "--num-prompts",
        "5",
        "--turns",
        "1:3",
        "--request-rate",
        "3",
        "--temperature",
        "0.7",
    ]
    plans = [run(*flags, "--dry-run", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert plans[0] == plans[1] != plans[2]
    lines = [json.loads(line) for line in plans[0].splitlines()]
    times = [line["session_at_s"] for line in lines]
    assert times == sorted(times) and len({line["body"]["seed"] for line in lines}) == len(lines) >= 5
    done = run(*flags, "--seed", "1", "--raw", str(tmp_path / "raw"))
    assert done.returncode == 0, done.stderr
    asked = [record.answered.key for record in records(tmp_path / "raw") if record.stream == "run"]
    assert sorted(asked) == sorted(line["key"] for line in lines), "what is sent is what the plan said"


def test_sessions_from_a_file_take_live_or_recorded_answers(stub: Stub, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"id": "s", "turns": [{"user": "a b c", "answer": "x"}, {"user": "d", "think_s": 0.05}]}\n'
    )
    lengths = {}
    for history in ("recorded", "live"):
        raw = tmp_path / history
        done = run(
            "--url",
            stub.url,
            "--prompts",
            str(file),
            "--output-len",
            "3",
            "--history",
            history,
            "--raw",
            str(raw),
        )
        assert done.returncode == 0, done.stderr
        lengths[history] = [r.answered.prompt_tokens for r in records(raw) if r.stream == "run"]
    assert lengths == {"recorded": [7, 9], "live": [7, 11]}, "one recorded word, or three live ones"


@pytest.mark.parametrize(
    ("behave", "fault", "told"),
    [
        ("error event", "error event", "the engine fell over"),
        ("cut", "cut off", "the connection broke"),
        ("html", "not a stream", "text/html"),
    ],
)
def test_a_server_that_goes_bad_is_reported_and_the_good_part_kept(
    tmp_path: Path, behave: str, fault: str, told: str
) -> None:
    with Stub() as stub:
        # 4 questions (how it counts, 2 of words, a warm-up) and 5 good requests come before
        done = run(*small(stub, tmp_path, *bad(behave, first=12), "--max-concurrency", "1"))
    assert done.returncode == 1, done.stderr
    assert f"requests failed: {fault}" in done.stdout and told in done.stdout
    entry, raw = kept(tmp_path)
    assert entry.complete, "its plan was sent; that too much failed is for the claim to judge"
    failed = [record.answered for record in raw if record.answered.fault]
    assert len(failed) == entry.failed == entry.detail["failures"][fault] and {
        answered.fault for answered in failed
    } == {fault}
    good = [record.answered for record in raw if record.stream == "run" and not record.answered.fault]
    assert len(entry.samples.keys) == len(good) > 0 and len(good) + len(failed) == 8


def test_missing_usage_leaves_out_what_needs_it_and_says_so(stub: Stub, tmp_path: Path) -> None:
    done = run(*small(stub, tmp_path, *bad("no usage"), "--goodput", "tpot:10"))
    assert done.returncode == 0, done.stderr
    assert "FAULT: 8 of 8 answers came without a count of tokens" in done.stdout
    assert "TPOT =" not in done.stdout and "TTFT, ms" in done.stdout
    entry, _ = kept(tmp_path)
    assert entry.complete and not {"tpot_ms", "output_tps", "goodput"} & entry.metrics.keys()
    assert "not checked" in done.stderr


def test_an_answer_that_never_ends_is_left_at_its_time(tmp_path: Path) -> None:
    with Stub() as stub:
        done = run(
            *small(stub, tmp_path, *bad("hang", first=12), "--max-concurrency", "1", "--timeout-s", "0.4")
        )
    assert done.returncode == 1
    assert "failed: timeout (no end within 0.4 s)" in done.stdout


def test_a_slow_first_token_is_a_figure_not_a_failure(stub: Stub, tmp_path: Path) -> None:
    done = run(*small(stub, tmp_path, *bad("slow first", first=5), number=4))
    assert done.returncode == 0, done.stderr
    entry, _ = kept(tmp_path)
    assert entry.metrics["ttft_ms"] > 500 > entry.metrics["tpot_ms"]


class Running:
    """A command that goes on until it is ended; ``started`` once requests of the run have ended."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            command(*flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def raw(self) -> list[Path]:
        return [*self._folder.glob("ledger.jsonl.raw/*")]

    def await_requests(self, number: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while not (files := self.raw()) or files[0].read_bytes().count(b'"stream":"run"') < number:
            assert time.monotonic() < until and self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out


def endless(stub: Stub, folder: Path) -> list[str]:
    plain = ["--url", stub.url, "--duration-s", "300", "--input-len", "20", "--output-len", "40"]
    return [*plain, "--max-concurrency", "4", "--ledger", str(folder / "ledger.jsonl")]


def test_ctrl_c_keeps_what_there_is_and_ends_with_130(stub: Stub, tmp_path: Path) -> None:
    running = Running(tmp_path, endless(stub, tmp_path))
    running.await_requests(6)
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    status, out = running.end(
        signal.SIGINT
    )  # pressed again, it loses nothing, even where Python is ending already
    assert status in {130, -signal.SIGINT} and "FAULT: interrupted" in out
    entry, raw = kept(tmp_path)
    assert not entry.complete and entry.faults[0] == "interrupted"
    whole = [record for record in raw if record.stream == "run" and not record.answered.fault]
    assert len(entry.samples.keys) == len(whole) >= 6
    open_then = [record.answered for record in raw if record.answered.fault == "interrupted"]
    assert 1 <= len(open_then) <= 4, "what was open is kept too, as far as it came"


def test_sigterm_is_as_ctrl_c(stub: Stub, tmp_path: Path) -> None:
    running = Running(tmp_path, endless(stub, tmp_path))
    running.await_requests(6)
    status, out = running.end(signal.SIGTERM)
    assert status == 130 and "FAULT: interrupted" in out
    assert not kept(tmp_path)[0].complete


def test_ctrl_c_in_the_warm_up_keeps_an_entry(tmp_path: Path) -> None:
    with Stub() as stub:
        running = Running(
            tmp_path, [*endless(stub, tmp_path), "--num-warmups", "400", *bad("slow first", first=5)]
        )
        assert running.process.stderr is not None
        while "warming up" not in (line := running.process.stderr.readline()):
            assert line, running.process.communicate()
        time.sleep(0.3)
        status, out = running.end(signal.SIGINT)
    assert status == 130 and "FAULT: interrupted" in out
    entry, raw = kept(tmp_path)
    assert not entry.complete and entry.samples.keys == ()
    assert raw and {record.stream for record in raw} == {"warm-up"}


def test_no_secret_is_kept_or_shown(stub: Stub, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    body = json.dumps({"metadata": {"api_key": "hunter2"}})
    for given in (["--api-key", "hunter2"], ["--api-key-file", str(tmp_path / "key")]):
        flags = small(stub, tmp_path, *given, "--header", "X-Key=hunter2", "--extra-body", body, number=1)
        flags[1] = stub.url.replace("//", "//me:hunter2@")
        done = run(*flags)
        assert done.returncode == 0, done.stderr
        assert "hunter2" not in done.stdout + done.stderr
    files = [tmp_path / "ledger.jsonl", *tmp_path.glob("ledger.jsonl.raw/*")]
    assert len(files) == 3 and not any("hunter2" in file.read_text() for file in files)
    first = ledger.read(tmp_path / "ledger.jsonl")[0]
    assert (
        first.settings["shape"]["extra"] == {"metadata": {"api_key": "HIDDEN"}}
        and first.subject["url"] == stub.url
    )


def test_time_waited_for_a_place_at_a_rate_is_shown_and_told(tmp_path: Path) -> None:
    with Stub() as stub:
        flags = small(stub, tmp_path, "--request-rate", "40", *bad("slow first", first=5), number=6)
        done = run(*flags, "--max-concurrency", "1")
        closed = run(*small(stub, tmp_path, number=2)[:-2])
    assert done.returncode == 0, done.stderr
    assert "waited at this client, ms" in done.stdout and "coordinated omission" in done.stdout
    entry, _ = kept(tmp_path)
    assert entry.detail["waits_ms"]["maximum"] > 2000 > entry.metrics["ttft_ms"]
    assert "2 of 2" in closed.stdout and "waited" not in closed.stdout, (
        "a closed loop has no times of its own"
    )


def test_continuous_usage_can_be_left_out_and_stands_in_the_settings(stub: Stub, tmp_path: Path) -> None:
    assert run(*small(stub, tmp_path, "--no-continuous-usage", number=2)).returncode == 0
    entry, _ = kept(tmp_path)
    assert entry.settings["shape"]["counting"] == entry.subject["usage"] == "at the end"


def test_a_tenth_may_fail(tmp_path: Path) -> None:
    with Stub() as stub:
        flags = small(stub, tmp_path, *bad("500", first=17), "--max-concurrency", "1", number=10)
        done = run(*flags)
    assert done.returncode == 0, done.stdout + done.stderr
    entry, _ = kept(tmp_path)
    assert entry.failed == 1 and entry.complete and "1 of 10 requests failed: status" in done.stdout


def test_ctrl_c_while_it_waits_for_a_server_is_quiet(tmp_path: Path) -> None:
    flags = ["--url", "http://127.0.0.1:1", "--ledger", str(tmp_path / "ledger.jsonl")]
    process = subprocess.Popen(
        command(*flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "cannot be reached; waiting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, errors) == (130, "", "") and not list(tmp_path.iterdir())


def test_sigkill_leaves_whole_lines(stub: Stub, tmp_path: Path) -> None:
    running = Running(tmp_path, endless(stub, tmp_path))
    running.await_requests(6)
    assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
    (file,) = running.raw()
    assert len([record for record in records(file) if record.stream == "run"]) >= 6
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_server_that_is_killed_ends_the_run_with_what_came(tmp_path: Path) -> None:
    with Stub() as stub:
        running = Running(tmp_path, endless(stub, tmp_path))
        running.await_requests(6)
        os.kill(stub.process.pid, signal.SIGKILL)
        out, _ = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 1
    assert "the server is gone" in out and "requests failed: unreachable" in out
    entry, raw = kept(tmp_path)
    assert not entry.complete and len(entry.samples.keys) >= 6
    # of each of the four places what was open, and perhaps the next one, on a connection whose end was not seen yet
    assert sum(record.answered.fault == "cut off" for record in raw) <= 8
    assert len([record for record in raw if record.answered.fault]) < 60, "it is not asked forever"


def test_no_server_at_all_is_told_in_time(tmp_path: Path) -> None:
    done = run(
        "--url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0.6", "--ledger", str(tmp_path / "l")
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.strip().endswith(
        "still cannot be reached after 0.6 s (--ready-check-timeout-sec): Connection refused"
    )


def test_a_server_that_refuses_is_told_with_its_sentence(stub: Stub) -> None:
    done = run("--url", stub.url, "--ignore-eos")
    assert done.returncode == 2 and "unknown: ['ignore_eos']" in done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--url 127.0.0.1:1 --num-prompts 0 --input-len x --goodput foo:1 ttft:0 --header x --burstiness 0 --turns 0",
            ["--url is", "--num-prompts is 0", "--input-len: 'x'", "'foo' is none of", "ttft:0 is no limit", "--header: 'x'",
             "--burstiness is 0", "--turns: '0'"],
        ),
        ("--url http://x --duration-s 1", ["sends without end"]),
        ("--url http://x --duration-s 1 --max-concurrency 2 --dry-run", ["prints without end"]),
        ("--url http://x --api-key a --api-key-file none", ["give one of both", "none cannot be read"]),
        ("--url http://x --extra-body 7", ["--extra-body: it is 7"]),
        ("--url http://x --extra-body {\"stream\":false}", ["--extra-body has stream"]),
        ("--url http://x --prompts none --input-len 7 --turns 2", ["--input-len is for random", "--turns is for random"]),
        ("--url http://x --prompts none", ["there is no such file"]),
        ("--url http://x --request-rate nan", ["--request-rate is nan"]),
        ("--url http://x --raw /", ["which is there already"]),
    ],
)  # fmt: skip
def test_flags_that_make_no_run_are_refused_all_at_once(flags: str, told: list[str]) -> None:
    done = run(*flags.split())
    assert done.returncode == 2
    for words in told:
        assert words in done.stderr, done.stderr


def test_numbers_of_a_ledger_line_are_plain_json(stub: Stub, tmp_path: Path) -> None:
    assert run(*small(stub, tmp_path)).returncode == 0
    line: dict[str, Any] = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert line["settings"]["arrivals"]["rate"] == "inf" and line["settings"]["max_concurrency"] == 4
    assert "model" not in line["settings"]["shape"]
