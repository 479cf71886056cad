"""Random and mutated requests against a whole server: ``python -m tests.server.fuzz --requests 100000 --seed 1 [--engine real]``.

Sixteen clients over real sockets, hanging up now and then. A fault is a 5xx (but a 503 that asks to try again: a full queue, no
time for a grammar), an error event of the 500s, a 4xx that is no error of the API's shape or a long one, an answer that never
ends, a process that died, a request left running, /health that stalls, and memory that grows. Prints a line for each round and
one JSON line at the end; exit status 1 if there was a fault. ``--only NUMBER`` sends one request of a run again and prints what
came of it.
"""

import argparse
import http.client
import itertools
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tests.e2e.serving import Served, await_that, exists, little_model, resident_bytes
from tests.e2e.test_memory import slope
from tests.server.conftest import MODEL, Server
from tests.server.shots import Shot, of_kept, shot
from tests.server.valid import RESPONSES

CLIENTS = 16
ROUNDS = 40
WARM_UP = 0.5  # the share of the rounds after which memory is watched
PATIENCE_S = 60.0  # for one answer
MOST_ERROR_BYTES = 64 << 10  # of an answer
MOST_STALL_S = 5.0  # of /health; a hundred times as long as on the idle server, where that is more
PROBE_EVERY_S = 0.05
MOST_BYTES_A_REQUEST = 200  # of growth after the warm-up
CONTEXT = 256
SHOWN_FAULTS = 10
STORED = 4 * CLIENTS  # soon full, so that memory is flat from then on
THINKS = '{"reasoning_effort": "low"}'  # unless a request says something else
FLAGS = (
    *("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(8 << 20), "--max-num-seqs", "32"),
    *("--default-chat-template-kwargs", THINKS, "--max-stored-responses", str(STORED)),
)
QUIET = {
    "disable_uvicorn_access_log": True,
    "default_chat_template_kwargs": THINKS,
    "max_stored_responses": STORED,
}
KEPT_ID = re.compile(rb"resp_[0-9a-f]{32}")


class Target(Protocol):
    """``Server`` and ``Served``: what of them is used here."""

    pid: int
    engine_pid: int

    def get(self, path: str) -> tuple[int, Any]: ...
    def metric(self, name: str) -> float: ...


class Fault(msgspec.Struct, frozen=True):
    """What went wrong with request ``number``; None: with the server as a whole."""

    number: int | None
    what: str


class Report(msgspec.Struct, kw_only=True):
    """What came of a run; ``statuses`` counts answers, "hung up" those that nobody waited for."""

    engine: str
    requests: int
    seed: int
    seconds: float
    statuses: dict[str, int]
    bytes_a_request: dict[str, int]
    resident_mib: dict[str, list[int]]
    health_idle_s: float  # the longest of some, before the run
    health_stall_s: float  # the longest of the run
    faults: list[Fault]


class Client:
    """One connection, opened again whenever it was closed."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self._port = port
        self._connection: http.client.HTTPConnection | None = None
        self._kept: str | None = None  # the newest response

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def fire(self, one: Shot) -> tuple[int, bytes] | None:
        """Status and body of the answer, None if this hung up before it had all. Faults are kept, not raised."""
        if self._kept is not None:
            one = of_kept(one, self._kept)
        try:
            status, body, kind = self._answered(one)
        except TimeoutError:
            self.close()
            self.faults.append(Fault(one.number, f"no end of the answer within {PATIENCE_S:.0f} s"))
            return None
        except _HungUp:
            self.close()
            self.statuses["hung up"] += 1
            return None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            self.faults.append(Fault(one.number, f"the connection broke: {error!r}"))
            return None
        self.statuses[str(status)] += 1
        if wrong := problem(one, status, body, kind):
            self.faults.append(Fault(one.number, wrong))
        if one.path == RESPONSES and (found := KEPT_ID.search(body)):
            self._kept = found[0].decode()
        return status, body

    def _answered(self, one: Shot) -> tuple[int, bytes, str]:
        """The answer. An idle connection may have been closed meanwhile (keep-alive ends): then once more, on a new one."""
        if self._connection is None:
            return self._answer(one)
        try:
            return self._answer(one)
        except ConnectionError:
            self.close()
            return self._answer(one)

    def _answer(self, one: Shot) -> tuple[int, bytes, str]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection = self._connection
        connection.putrequest(one.method, one.path, skip_accept_encoding=True)
        for name, value in one.headers.items():
            connection.putheader(name, value.encode("latin-1"))
        connection.putheader("Content-Length", str(len(one.body)))
        connection.endheaders()
        if one.sends is not None:
            connection.send(one.body[: one.sends])
            raise _HungUp
        connection.send(one.body)
        if one.reads == 0:
            raise _HungUp
        response = connection.getresponse()
        if one.reads is not None:
            response.read(one.reads)
            raise _HungUp
        body = response.read()
        return response.status, body, response.headers.get("content-type", "")


class _HungUp(Exception):
    """This client went away, as its shot wanted."""


def problem(one: Shot, status: int, body: bytes, kind: str) -> str | None:
    """What is wrong with an answer, if anything."""
    if status == 503 and b"try again later" in body:
        return None
    if status >= 500:
        return f"{status}: {body[:300]!r}"
    if status >= 400 and one.method != "HEAD":
        return _shape_problem(one, status, body)
    if kind.startswith("text/event-stream") and (wrong := _stream_problem(body)):
        return wrong
    return None


def _shape_problem(one: Shot, status: int, body: bytes) -> str | None:
    if len(body) > MOST_ERROR_BYTES:
        return f"{status} in {len(body)} bytes: {body[:300]!r}"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object: {body[:300]!r}"
    anthropic = one.path.startswith("/v1/messages")
    if not isinstance(error, dict) or not error.get("message") or (not anthropic and error["code"] != status):
        return f"{status} with a strange error: {body[:300]!r}"
    return None


def _stream_problem(body: bytes) -> str | None:
    if not body.endswith(b"\n\n"):
        return f"a stream ends within an event: {body[-200:]!r}"
    for line in body.splitlines():
        if line.startswith(b"data: ") and b'"error"' in line and b'"code":5' in line:
            return f"an error event: {line[:300]!r}"
    return None


class Probe(threading.Thread):
    """Asks /health again and again, and keeps how long the longest answer took."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self.idle_s = max(self._took(target) for _ in range(20))
        self.stall_s = 0.0
        self._target = target
        self._ended = threading.Event()

    @staticmethod
    def _took(target: Target) -> float:
        start = time.monotonic()
        target.get("/health")
        return time.monotonic() - start

    def run(self) -> None:
        while not self._ended.wait(PROBE_EVERY_S):
            try:
                self.stall_s = max(self.stall_s, self._took(self._target))
            except OSError:
                return  # the server is gone, which others see

    def faults(self) -> list[Fault]:
        """Ends it."""
        self._ended.set()
        self.join()
        limit_s = max(MOST_STALL_S, 100 * self.idle_s)
        return [Fault(None, f"/health took {self.stall_s:.1f} s")] if self.stall_s > limit_s else []


def run(
    target: Target, *, port: int, engine: str, requests: int, seed: int, rounds: int = ROUNDS, told: bool
) -> Report:
    """Fire shots 0 .. ``requests`` in ``rounds``; after each the server must come to rest, and its memory is read."""
    clients = [Client(port) for _ in range(CLIENTS)]
    pids = {"server": target.pid, "engine": target.engine_pid}
    resident: dict[str, list[int]] = {name: [] for name in pids}
    faults: list[Fault] = []
    probe = Probe(target)
    probe.start()
    start = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as threads:
        for number in range(rounds):
            bounds = [number * requests // rounds, (number + 1) * requests // rounds]
            numbers = itertools.count(bounds[0])
            list(threads.map(_work, clients, [seed] * CLIENTS, [numbers] * CLIENTS, [bounds[1]] * CLIENTS))
            faults += _unrest(target, pids)
            for name, pid in pids.items():
                resident[name].append(resident_bytes(pid) if exists(pid) else 0)
            if told:
                _tell(bounds[1], requests, time.monotonic() - start, clients)
            if faults:
                break
    faults += probe.faults()
    for client in clients:
        client.close()
        faults += client.faults
    watched = {name: values[int(WARM_UP * rounds) :] for name, values in resident.items()}
    growth = {
        name: round(slope(values) / (requests / rounds)) if len(values) > 1 else 0
        for name, values in watched.items()
    }
    return Report(
        engine=engine,
        requests=requests,
        seed=seed,
        seconds=round(time.monotonic() - start, 1),
        statuses=dict(sorted(sum((client.statuses for client in clients), Counter()).items())),
        bytes_a_request=growth,
        resident_mib={name: [value >> 20 for value in values] for name, values in resident.items()},
        health_idle_s=round(probe.idle_s, 3),
        health_stall_s=round(probe.stall_s, 3),
        faults=faults,
    )


def _work(client: Client, seed: int, numbers: "itertools.count[int]", end: int) -> None:
    while (number := next(numbers)) < end:
        client.fire(shot(seed, number))


def _unrest(target: Target, pids: dict[str, int]) -> list[Fault]:
    """Whatever says that the server is not as it was: a dead process, /health, a request that still runs."""
    faults = [Fault(None, f"the {name} process has ended") for name, pid in pids.items() if not exists(pid)]
    if faults:
        return faults
    if (health := target.get("/health")[0]) != 200:
        return [Fault(None, f"/health says {health}")]

    def at_rest() -> bool:
        return not any(target.metric(f"num_requests_{state}") for state in ("running", "waiting"))

    try:
        await_that(at_rest, every_s=0.05, within_s=PATIENCE_S)
    except AssertionError:
        return [Fault(None, "requests are left running although every client has its answer or has gone")]
    return []


def _tell(done: int, requests: int, seconds: float, clients: Sequence[Client]) -> None:
    counts = sum((client.statuses for client in clients), Counter())
    faults = sum(len(client.faults) for client in clients)
    shown = " ".join(f"{status}:{count}" for status, count in sorted(counts.items()))
    sys.stderr.write(
        f"{done}/{requests} in {seconds:.0f} s ({done / seconds:.0f}/s) {shown} faults:{faults}\n"
    )


def flat(report: Report) -> bool:
    return all(growth <= MOST_BYTES_A_REQUEST for growth in report.bytes_a_request.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("stub", "real"), default="stub")
    parser.add_argument("--only", type=int, help="send this request alone, and print the answer")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if given.engine == "stub":
            target = Server(Path(folder), step_s=0.0, max_model_len=CONTEXT, serving=QUIET)
            port, end = target.port, target.stop
        else:
            target = Served(little_model(Path(folder) / "model"), *FLAGS, "--served-model-name", MODEL)
            port, end = int(target.port), target.remove
        try:
            if given.only is not None:
                return _only(port, shot(given.seed, given.only))
            report = run(
                target, port=port, engine=given.engine, requests=given.requests, seed=given.seed, told=True
            )
        finally:
            end()
    for fault in report.faults[:SHOWN_FAULTS]:
        sys.stderr.write(f"request {fault.number}: {fault.what}\n")
    print(msgspec.json.encode(report).decode())
    return int(bool(report.faults) or not flat(report))


def _only(port: int, one: Shot) -> int:
    client = Client(port)
    print(one.method, one.path, one.headers, one.body[:4000])
    print(client.fire(one), *client.faults)
    client.close()
    return int(bool(client.faults))


if __name__ == "__main__":
    sys.exit(main())
