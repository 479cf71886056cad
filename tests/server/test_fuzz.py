"""A short run of ``fuzz`` against the stub engine and against a whole one; the long one is ``python -m tests.server.fuzz``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Served, little_model
from tests.server import fuzz
from tests.server.conftest import MODEL, Server
from tests.server.shots import READ, VALID, shot

REQUESTS = 1000
SEED = 5


def check(report: fuzz.Report, record_property: Callable[[str, Any], None]) -> None:
    record_property("statuses", report.statuses)
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
    status, answer = server.post(path, body)
    assert status == 200, answer


@pytest.mark.parametrize("path", READ)
def test_what_is_read_is_there(server: Server, path: str) -> None:
    assert server.get(path)[0] == (404 if path.endswith("resp_x") else 200)


def test_a_shot_is_the_same_for_ever() -> None:
    assert [shot(3, number) for number in range(300)] == [shot(3, number) for number in range(300)]
    assert shot(3, 1) != shot(4, 1)


def test_faults_are_seen(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """A 500, and an engine that dies: the run says so."""
    server = own_server(log=tmp_path / "log")
    salt = server.script("s", "", finish="die")["cache_salt"]
    assert any(salt in str(body) for _, body in VALID), "some shots name the script"
    report = fuzz.run(server, port=server.port, engine="stub", requests=400, seed=1, rounds=1, told=False)
    assert any(fault.number is not None and fault.what.startswith("503") for fault in report.faults)
    assert any(fault.what == "the engine process has ended" for fault in report.faults)
