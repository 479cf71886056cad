"""``flashstep serve`` as a user runs it: ready within seconds, answers, ends cleanly, leaves nothing behind."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

READY_S = 10.0
SLACK = 3.0  # other tests run beside this one
SMALL = ("--load-format", "dummy", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20))


class Served:
    """A server process and how to talk to it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flashstep", "serve", *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=(home / "stderr").open("w"),
            text=True,
            cwd=Path(__file__).parents[2],
            env={"TMPDIR": str(home), "OMP_NUM_THREADS": "1"},
        )

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.home / "stderr").read_text()
        return line

    def post(self, port: int, path: str, body: dict) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator:
    running: list[Served] = []

    def start(*arguments: str) -> Served:
        running.append(Served(tmp_path, *arguments))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def sockets_left(home: Path) -> list[Path]:
    return list(home.glob("flashstep-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_answers_and_ends_cleanly(serve, tmp_path: Path, number: int) -> None:
    served = serve("--port", "0", "--served-model-name", "first", "second")
    line = served.wait_ready()
    took = time.monotonic() - served.started
    assert took < READY_S * SLACK, f"ready after {took:.1f} s"
    found = re.fullmatch(r"first is served at http://127\.0\.0\.1:(\d+)/v1 \(ready in \d+\.\d s\)\n", line)
    assert found, line
    body = {"model": "second", "prompt": "one two", "max_tokens": 3, "ignore_eos": True}
    answer = served.post(int(found[1]), "/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 3
    assert len(sockets_left(tmp_path)) == 1
    assert served.end(number) == 0
    assert sockets_left(tmp_path) == []
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_a_port_in_use_is_a_sentence(serve, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        served = serve("--port", str(taken.getsockname()[1]))
        assert served.process.wait(timeout=60) == 1
    shown = (tmp_path / "stderr").read_text()
    assert "cannot listen on 127.0.0.1" in shown and "Traceback" not in shown
    assert sockets_left(tmp_path) == []


def test_what_is_wrong_with_the_engine_is_told(serve, tmp_path: Path) -> None:
    served = serve("--max-model-len", "1000000", "--port", "0")
    assert served.process.wait(timeout=60) == 1
    assert "kv_cache_memory_bytes" in (tmp_path / "stderr").read_text()
    assert sockets_left(tmp_path) == []
