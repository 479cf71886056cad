"""Memory of both processes stays flat over 1,000 requests of every kind: whole, streamed, hung up on, refused."""

import http.client
import itertools
import json
import queue
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.serving import PATIENCE_S, Served, await_that, little_model, resident_bytes

WARM_UP = 800  # allocators, caches and the prefix index (whose size the number of blocks bounds) fill first
REQUESTS = 1000
EVERY = 50
CLIENTS = 8
BALLAST = {
    str(token): 0.0 for token in range(300)
}  # a logit bias of no effect: 20 KB in an engine that forgets no request
MOST_BYTES_A_REQUEST = {
    "server": 1536,
    "engine": 6000,
}  # of growth; the engine's allocator alone drifted by up to 1,800


def kinds(order: random.Random) -> dict[str, Any]:
    """One request: usually an answer of a few tokens to a prompt that shares its beginning with others."""
    shared = [100 + order.randrange(4)] * order.choice((0, 16, 40))
    prompt = [*shared, *(order.randrange(3, 2000) for _ in range(order.randint(1, 24)))]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": order.randint(1, 4),
        "ignore_eos": True,
        "logit_bias": BALLAST,
    }
    kind = order.random()
    if kind < 0.3:
        body |= {"stream": True, "logprobs": 3, "n": 2}
    elif kind < 0.4:
        body |= {"stream": True, "max_tokens": 1500, "drop": True}
    elif kind < 0.45:
        body |= {"max_tokens": -1}
    return body


def ask(connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
    body = dict(body)
    drop = body.pop("drop", False)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == (400 if body["max_tokens"] < 0 else 200)
    if drop:
        response.readline()
        response.close()
        connection.close()  # the next request opens it again
    else:
        response.read()


def traffic(served: Served, count: int, *, seed: int) -> None:
    """``count`` requests by several clients."""
    order = random.Random(seed)
    bodies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for _ in range(count):
        bodies.put(kinds(order))

    def client(_: int) -> None:
        connection = http.client.HTTPConnection(served.host, int(served.port), timeout=PATIENCE_S)
        try:
            while True:
                ask(connection, bodies.get_nowait())
        except queue.Empty:
            connection.close()

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))


def slope(values: list[int]) -> float:
    """Growth from one sample to the next: the median of the slopes of all pairs, so that an allocator's one step is none."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


def test_memory_is_flat(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    model = little_model(tmp_path / "little")
    # few blocks, so that the prefix index has its final size early
    flags = (
        "--max-model-len",
        "2000",
        "--num-gpu-blocks-override",
        "160",
        "--kv-cache-memory-bytes",
        str(1 << 20),
    )
    served = Served(model, *flags, "--max-num-seqs", "16")
    try:
        traffic(served, WARM_UP, seed=0)
        pids = {"server": served.pid, "engine": served.engine_pid}
        samples: dict[str, list[int]] = {name: [] for name in pids}
        for number in range(REQUESTS // EVERY):
            traffic(served, EVERY, seed=1 + number)
            await_that(lambda: served.idle)
            for name, pid in pids.items():
                samples[name].append(resident_bytes(pid))
        for name, values in samples.items():
            growth = slope(values) / EVERY
            record_property(f"{name}_bytes_a_request", round(growth))
            print(
                f"{name}: {values[-1] >> 20} MiB, {growth:+.0f} bytes a request; KiB {[v >> 10 for v in values]}"
            )
        for name, values in samples.items():
            assert slope(values) / EVERY < MOST_BYTES_A_REQUEST[name], (name, values)
        assert "Traceback" not in served.log()
    finally:
        served.remove()
