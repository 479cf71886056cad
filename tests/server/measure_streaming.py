"""How many streamed tokens a second one core of the server carries.

``python -m tests.server.measure_streaming [STREAMS] [TOKENS] [RUN] [RATE]``. The server process is pinned to one core; the stub
engine and the reading client share another. RUN is the number of tokens the stub gives a request in a step (1: no speculation);
RATE is how many tokens a second the stub makes in all. Prints one JSON line for chat and one for completions;
``tokens_per_cpu_second`` is what the core would do if it had nothing else to do.
"""

import json
import os
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests.server.conftest import MODEL, Server


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_streams(server: Server, *, streams: int, tokens: int, chat: bool) -> tuple[int, int]:
    """Open ``streams`` requests at once and read them to their end. Gives bytes and events."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    body = json.dumps({"model": MODEL, "stream": True, "max_tokens": tokens, "ignore_eos": True, **prompt})
    request = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    )
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request.encode())
        selector.register(connection, selectors.EVENT_READ)
    received = events = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)
            received += len(data)
            events += data.count(b"data: ")
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return received, events


def measure(*, streams: int, tokens: int, run: int, rate: int, chat: bool) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scripts:
        server = Server(
            Path(scripts),
            log=Path(scripts) / "log",
            step_s=streams * run / rate,
            tokens_per_step=run,
            max_model_len=tokens + 100,
        )
        try:
            os.sched_setaffinity(server.pid, cores[:1])
            os.sched_setaffinity(server.engine_pid, cores[-1:])
            os.sched_setaffinity(0, cores[-1:])
            read_streams(server, streams=8, tokens=100, chat=chat)
            cpu, start = cpu_seconds(server.pid), time.monotonic()
            received, events = read_streams(server, streams=streams, tokens=tokens, chat=chat)
            wall, cpu = time.monotonic() - start, cpu_seconds(server.pid) - cpu
        finally:
            os.sched_setaffinity(0, cores)
            server.stop()
    total = streams * tokens
    return {
        "chat": chat,
        "streams": streams,
        "tokens": total,
        "run": run,
        "rate": rate,
        "tokens_per_second": round(total / wall),
        "tokens_per_cpu_second": round(total / cpu),
        "tokens_per_event": round(total / events, 2),
        "bytes_per_token": round(received / total, 1),
    }


if __name__ == "__main__":
    given = [int(value) for value in sys.argv[1:]]
    streams, tokens, run, rate = given + [64, 2000, 1, 50_000][len(given) :]
    for chat in (True, False):
        line = json.dumps(measure(streams=streams, tokens=tokens, run=run, rate=rate, chat=chat))
        sys.stdout.write(line + "\n")
