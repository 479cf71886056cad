"""``flashstep eval`` as a process: a real server and the same engine here, and what happens when server or user goes away."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flashstep.bench.ledger import read
from flashstep.bench.quality import prompts
from flashstep.bench.quality.questions import SHIPPED
from flashstep.cli import main
from tests.e2e.serving import ROOT, TRAINED, UNTRAINED, Served, await_that, environment, small_model

QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]


class Stub:
    """An OpenAI server that answers every sum, one chunk a chat; ``act`` may do something else with a request's number."""

    def __init__(self, act: Callable[[int, BaseHTTPRequestHandler], bool] = lambda *_: False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.card: dict[str, Any] = {}
        self.metrics = "vllm:spec_decode_num_drafts_total 1\n"
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                pages = {
                    "/v1/models": json.dumps({"data": [{"id": "stub"} | stub.card]}),
                    "/version": json.dumps({"version": "9.9"}),
                    "/metrics": stub.metrics,
                }
                self._send(pages[self.path].encode(), "text/plain")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                if act(len(stub.bodies), self):
                    return
                said = body["messages"][-1]["content"]
                answer = f"It is {int(said.split()[2]) + 1}."
                events = [
                    {
                        "choices": [
                            {"delta": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
                        ]
                    },
                    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
                ]
                data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
                self._send(data.encode(), "text/event-stream")

            def _send(self, data: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def served(stub: Stub) -> Iterator[Stub]:
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield stub
    finally:
        stub.server.shutdown()
        stub.server.server_close()
        thread.join()


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return str(file)


def rows(file: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, file.read_text().splitlines()) if "id" in row]


def test_a_run_at_any_server(tmp_path: Path, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, answers = tmp_path / "l.jsonl", tmp_path / "a.jsonl"
    with served(Stub()) as stub:
        flags = [
            "--url",
            stub.url,
            "--answers",
            str(answers),
            "--ledger",
            str(ledger),
            "--label",
            "A",
            "--job",
            "j",
        ]
        more = ["--runs", "2", "--round", "4", "--extra-body", '{"min_p": 0.5}', "--thinking", "off"]
        assert main(["eval", questions, *flags, *more]) == 0
    first, second = read(ledger)
    assert (first.round, second.round, first.label, first.job) == (4, 5, "A", "j")
    assert first.metrics == {"accuracy": 1.0} and first.complete and len(first.samples.keys) == 40
    assert first.settings == second.settings and first.seed == 4
    assert first.subject["model"] == "stub" and first.subject["server"] == "9.9"
    assert first.subject["rejection_sample_method"].startswith("real")
    assert first.raw == "a.jsonl"
    assert {row["run"] for row in rows(answers)} == {4, 5} and rows(answers)[0]["reply"]["output_tokens"] == 4
    assert stub.bodies[0]["min_p"] == 0.5 and stub.bodies[0]["chat_template_kwargs"] == {"thinking": False}
    assert "100.00%" in capsys.readouterr().out


def test_a_server_of_ours_without_drafts_is_known(tmp_path: Path, questions: str) -> None:
    ledger = tmp_path / "l.jsonl"
    with served(Stub()) as stub:
        stub.metrics = "flashstep:max_num_seqs 8\n"
        for label, card in (("ours", {"owned_by": "flashstep"}), ("theirs", {"owned_by": "vllm"})):
            stub.card = card
            command = ["eval", questions, "--url", stub.url, "--limit", "3", "--ledger", str(ledger)]
            assert main([*command, "--label", label]) == 0
    told = {entry.label: entry.subject["rejection_sample_method"] for entry in read(ledger)}
    assert told == {"ours": "no drafts", "theirs": "the server does not tell"}
    raw = [entry.raw or "" for entry in read(ledger)]
    assert all(name.startswith("l.jsonl.raw/") and (tmp_path / name).is_file() for name in raw)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["l.jsonl", "sums.jsonl"]


def test_synthetic_acceptance_is_refused(questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    with served(Stub()) as stub:
        stub.metrics = "flashstep:synthetic_spec_decode_num_drafts_total 1\n"
        assert main(["eval", questions, "--url", stub.url]) == 2
        assert "with synthetic acceptance no text is; nothing was asked" in capsys.readouterr().err
        stub.metrics, stub.card = "", {"falsified_by": ["recorded routing", "filled cache"]}
        assert main(["eval", questions, "--url", stub.url]) == 2
    assert "with recorded routing and filled cache no text is" in capsys.readouterr().err
    assert not stub.bodies
    method = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}'
    assert main(["eval", questions, "--speculative-config", method]) == 2
    assert main(["eval", questions, "--routing", "uniform"]) == 2
    assert "with uniform routing no text is" in capsys.readouterr().err


def test_failures_make_a_run_incomplete(
    tmp_path: Path, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number % 4:
            return False
        handler.send_error(503, "full")
        return True

    ledger, answers = tmp_path / "l.jsonl", tmp_path / "a.jsonl"
    command = ["eval", questions, "--answers", str(answers), "--ledger", str(ledger)]
    with served(Stub(full)) as stub:
        assert main([*command, "--url", stub.url]) == 1
        (entry,) = read(ledger)
        assert entry.metrics == {"accuracy": 1.0} and not entry.complete and len(entry.samples.keys) == 30
        assert entry.faults[0] == "10 of 40 questions have no answer and are not counted"
        assert "--resume" in capsys.readouterr().err
        for _ in range(4):  # some of those fail again
            main([*command, "--url", stub.url, "--resume"])
    assert read(ledger)[-1].complete and len(read(ledger)[-1].samples.keys) == 40


def test_a_dying_server_ends_the_run(tmp_path: Path, questions: str) -> None:
    def die(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number == 10:
            handler.server.socket.close()
        if number >= 10:
            handler.connection.close()
        return number >= 10

    ledger, answers = tmp_path / "l.jsonl", tmp_path / "a.jsonl"
    with served(Stub(die)) as stub:
        flags = ["--url", stub.url, "--concurrency", "1", "--answers", str(answers), "--ledger", str(ledger)]
        assert main(["eval", questions, *flags]) == 1
    (entry,) = read(ledger)
    assert entry.faults[0].startswith("ended early:") and not entry.complete
    assert len(entry.samples.keys) == 9
    assert len(rows(answers)) < 20  # it did not go on asking


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_was_answered_survives(tmp_path: Path, questions: str, number: int, status: int) -> None:
    def slowly(count: int, handler: BaseHTTPRequestHandler) -> bool:
        time.sleep(0.02 if count > 12 else 0)
        return False

    ledger, answers = tmp_path / "l.jsonl", tmp_path / "a.jsonl"
    with served(Stub(slowly)) as stub:
        command = [
            sys.executable,
            "-m",
            "flashstep",
            "eval",
            questions,
            "--url",
            stub.url,
            "--concurrency",
            "2",
        ]
        command += ["--answers", str(answers), "--ledger", str(ledger)]
        how: dict[str, Any] = {
            "env": environment(PYTHONPATH=str(ROOT)),
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(command, **how)
        await_that(lambda: len(stub.bodies) > 14)
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=30)
        assert process.returncode == status, told
        before = len(rows(answers)) if number == signal.SIGINT else 12
        assert 12 <= before < 40
        if number == signal.SIGINT:
            (entry,) = read(ledger)
            assert entry.faults[0] == "interrupted" and len(entry.samples.keys) == before
            assert "--resume goes on" in told
        done = subprocess.run([*command, "--resume"], check=True, timeout=60, **how)
    assert len(stub.bodies) < 40 + 6, done.stderr  # nothing that was answered was asked again
    entry = read(ledger)[-1]
    assert entry.complete and entry.metrics == {"accuracy": 1.0} and len(entry.samples.keys) == 40


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--url", "http://127.0.0.1:9", "--model", "x", "--max-num-seqs", "3"], ["not both", "--max-num-seqs: engine options"]),
        (["--api-key", "k", "--resume", "--runs", "0"], ["--api-key is for a server", "--resume goes on", "--runs is 0"]),
        (["--url", "http://127.0.0.1:9", "--extra-body", "[1]"], ["--extra-body"]),
        (["--url", "http://127.0.0.1:9"], ["lists no model at /v1/models"]),
        (["--url", "127.0.0.1:9"], ["--url is '127.0.0.1:9'"]),
        (["--answers", "/nowhere/a.jsonl"], ["there is no folder /nowhere"]),
        (["--round", "-1", "--concurrency", "0"], ["--round is -1", "--concurrency is 0"]),
        (["--answers", "new.jsonl", "--resume"], ["--resume: there is no file new.jsonl to go on with"]),
        (["--answers", __file__], ["is there already: go on with it by --resume"]),
        (["--ledger", __file__], ["test_eval.py, which is there and no ledger"]),
        (["--ledger", "/proc/x.jsonl", "--runs", "0"], ["--ledger is /proc/x.jsonl; it cannot be written", "--runs is 0"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(
    questions: str, flags: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", questions, *flags]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in told), error


def replies(tmp_path: Path, server: Served, commands: dict[str, list[str]], here: list[str]) -> None:
    """Every reply of ``commands``, its reasoning, tokens and end, is the same over HTTP and in this process."""
    for name, command in commands.items():
        found = []
        for where, flags in (("http", ["--url", server.url]), ("here", here)):
            file = tmp_path / f"{name}-{where}.jsonl"
            assert main(["eval", *command, *flags, "--answers", str(file)]) == 0
            found.append({(row["run"], row["id"]): (row["reply"], row["right"]) for row in rows(file)})
        assert found[0] == found[1] and found[0]


DRAWN = [
    "--api",
    "completions",
    "--num-fewshot",
    "2",
    "--temperature",
    "1",
    "--max-tokens",
    "30",
    "--runs",
    "2",
]


def test_answers_are_the_same_over_http_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small random model: nothing is right, and everything must be equal all the same, its stops too."""
    monkeypatch.setattr(prompts, "STOP", ("e", "th"))  # what random text does not miss
    model = small_model(tmp_path / "model")
    server = Served(model)
    commands = {
        "chat": ["word-problems", "--limit", "4", "--max-tokens", "30"],
        "drawn": ["word-problems", "--limit", "3", *DRAWN],
    }
    try:
        replies(tmp_path, server, commands, ["--model", str(model), "--load-format", "dummy"])
    finally:
        server.remove()
    drawn = [row["reply"] for row in rows(tmp_path / "drawn-here.jsonl")]
    assert any(reply["finish_reason"] == "stop" for reply in drawn)
    assert not any("e" in reply["text"] for reply in drawn)
    seeds = {row["seed"] for row in rows(tmp_path / "drawn-here.jsonl")}
    assert len(seeds) == 6


@pytest.mark.slow
@pytest.mark.skipif(not TRAINED, reason=UNTRAINED)
def test_the_tiny_model_is_as_good_over_http_as_here(tmp_path: Path) -> None:
    server = Served()
    sets = {name: [name, "--limit", "6"] for name in SHIPPED}
    try:
        replies(tmp_path, server, sets | {"drawn": ["word-problems", "--limit", "3", *DRAWN]}, [])
    finally:
        server.remove()
    for name in SHIPPED:
        assert sum(row["right"] for row in rows(tmp_path / f"{name}-here.jsonl")) >= 5
