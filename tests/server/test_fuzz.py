"""A short run of ``fuzz`` against the stub engine and against a whole one; the long one is ``python -m tests.server.fuzz``."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.serving import Served, little_model
from tests.server import fuzz
from tests.server.conftest import MODEL, Server
from tests.server.shots import shot
from tests.server.test_sse import comes_true
from tests.server.valid import KEPT, READ, RESPONSES, TEXT, VALID

REQUESTS = 1000
SEED = 5


def check(report: fuzz.Report, record_property: Callable[[str, Any], None]) -> None:
    record_property("statuses", report.statuses)
    record_property("health_stall_s", report.health_stall_s)
    assert not report.faults, report.faults
    assert report.statuses["200"] > report.requests / 8, "mutations leave enough whole"
    assert sum(report.statuses.values()) == report.requests


def test_the_server_survives_what_chance_sends(
    own_server: Callable[..., Server], tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    server = own_server(step_s=0.0, max_model_len=fuzz.CONTEXT, serving=fuzz.QUIET, log=tmp_path / "log")
    report = fuzz.run(
        server, port=server.port, engine="stub", requests=REQUESTS, seed=SEED, rounds=4, told=False
    )
    check(report, record_property)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(little_model(tmp_path / "model"), *fuzz.FLAGS, "--served-model-name", MODEL)
    yield made
    made.remove()


def test_the_engine_survives_what_chance_sends(
    served: Served, record_property: Callable[[str, Any], None]
) -> None:
    report = fuzz.run(
        served, port=int(served.port), engine="real", requests=REQUESTS, seed=SEED + 1, rounds=4, told=False
    )
    check(report, record_property)
    assert "Traceback" not in served.log()


@pytest.mark.parametrize("at", range(len(VALID)))
def test_what_is_mutated_is_valid(server: Server, at: int) -> None:
    """Otherwise only the first check of a body would be tried."""
    path, body = VALID[at]
    if KEPT in body.values():
        kept = server.post(RESPONSES, {"input": "hi", "max_output_tokens": 1})[1]["id"]
        body = body | {"previous_response_id": kept}
    status, answer = server.post(path, body)
    assert status == 200, answer


@pytest.mark.parametrize("path", READ)
def test_what_is_read_is_there(server: Server, path: str) -> None:
    assert server.get(path)[0] == (404 if path.endswith("resp_x") else 200)


def test_a_shot_is_the_same_for_ever() -> None:
    assert [shot(3, number) for number in range(300)] == [shot(3, number) for number in range(300)]
    assert shot(3, 1) != shot(4, 1)


def test_what_is_no_fault(own_server: Callable[..., Server]) -> None:
    """A full queue's 503; any other is one, and so is a long error."""
    server = own_server(serving={"max_num_queued_reqs": 1})
    salt = server.script("held", [[5]], holds=[0])
    one, client = shot(1, 1), fuzz.Client(server.port)
    one = msgspec.structs.replace(
        one, method="POST", path=TEXT, headers={}, body=b'{"prompt": "x"}', reads=None
    )
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(server.post, TEXT, {"prompt": "x", **salt})
        assert comes_true(lambda: server.metric("num_requests_running") == 1)
        answered = client.fire(one)
        assert answered is not None and answered[0] == 503 and not client.faults
        server.release("held", 0)
        assert running.result()[0] == 200
    client.close()
    status, body = answered
    assert fuzz.problem(one, status, body.replace(b"try again", b"go"), "application/json")
    long = json.dumps({"error": {"message": "x" * fuzz.MOST_ERROR_BYTES, "code": 400}}).encode()
    assert "bytes" in (fuzz.problem(one, 400, long, "application/json") or "")


def test_a_stall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = threading.Event()

    class Target:
        pid = engine_pid = 0

        def get(self, path: str) -> tuple[int, Any]:
            time.sleep(0.3 if stalls.is_set() else 0)
            return 200, path

        def metric(self, name: str) -> float:
            return len(name)

    monkeypatch.setattr(fuzz, "MOST_STALL_S", 0.2)
    probe = fuzz.Probe(Target())
    probe.idle_s = 0.001
    stalls.set()
    probe.start()
    assert comes_true(lambda: probe.stall_s > 0)
    assert [fault.what.split(" took")[0] for fault in probe.faults()] == ["/health"]


def test_faults_are_seen(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """A 500, and an engine that dies: the run says so."""
    server = own_server(log=tmp_path / "log")
    salt = server.script("s", "", finish="die")["cache_salt"]
    assert any(salt in str(body) for _, body in VALID), "some shots name the script"
    report = fuzz.run(server, port=server.port, engine="stub", requests=400, seed=1, rounds=1, told=False)
    assert any(fault.number is not None and fault.what.startswith("503") for fault in report.faults)
    assert any(fault.what == "the engine process has ended" for fault in report.faults)
