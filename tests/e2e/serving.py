"""A real ``flashstep serve`` for tests: both processes, real sockets, and what can be seen of them from outside.

``Served`` starts the command as a user would, in an empty working directory, with a temporary folder of its own, so that what it
leaves behind shows. Models: the embedded tiny one (random weights as long as it has none), or a very small one of every branch.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai

from tests.weights.conftest import tiny_json

ROOT = Path(__file__).parents[2]
TINY = ROOT / "flashstep" / "tiny"
TRAINED = any(TINY.glob("model*.safetensors"))
UNTRAINED = "the embedded model has no weights yet"
# what makes the embedded model loadable today, for any command
TINY_FLAGS = () if TRAINED else ("--load-format", "dummy")
PATIENCE_S = 120.0  # for anything that must happen; a failure, not a measure


def environment(**changes: str) -> dict[str, str]:
    """What a child inherits: everything but the checkout on its path, and one compute thread."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # noqa: TID251
    return inherited | {"OMP_NUM_THREADS": "1"} | changes


def small_model(folder: Path) -> Path:
    """The config and tokenizer of a model of every branch, a fiftieth of the tiny one, with the tiny one's tokenizer."""
    return _write(folder, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1], num_nextn_predict_layers=0)


def little_model(folder: Path) -> Path:
    """As little computation as there can be behind a whole engine: a window layer and a Full layer, one head, one expert."""
    ones = (
        "num_attention_heads o_groups n_routed_experts num_experts_per_tok index_n_heads hc_mult hc_sinkhorn_iters "
        "dspark_n_routed_experts dspark_num_experts_per_tok"
    )
    return _write(
        folder,
        **dict.fromkeys(ones.split(), 1),
        hidden_size=32,
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        compress_ratios=[0, 2],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        candidate_source_layer_id=-1,
        engram_layer_ids=[1],
        engram_num_embeddings=[660],
        dspark_target_layer_ids=[0, 1],
    )


def _write(folder: Path, **changes: Any) -> Path:
    shipped = json.loads((TINY / "config.json").read_text())
    text = shipped["text_config"]
    kept = {
        name: text[name] for name in ("vocab_size", "engram_compressed_vocab_size", "max_position_embeddings")
    }
    config = tiny_json(**kept | changes)
    config |= {name: shipped[name] for name in shipped if name.endswith("_token_id")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def await_that(
    condition: Callable[[], bool], *, every_s: float = 0.01, within_s: float = PATIENCE_S
) -> float:
    """Ask until ``condition`` holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"still not so after {within_s} s"
        time.sleep(every_s)
    return time.monotonic() - start


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_s(*pids: int) -> float:
    """What the processes, and their children that have ended, took of the processor."""
    spent = [Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:15] for pid in pids]
    return sum(int(ticks) for each in spent for ticks in each) / os.sysconf("SC_CLK_TCK")


def exists(pid: int) -> bool:
    """Whether the process is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Served:
    """A ``flashstep serve`` process tree. ``model`` None is the embedded tiny model; ``wait`` False leaves it loading."""

    command: tuple[str, ...] = ("serve",)

    def __init__(self, model: Path | None = None, *flags: str, wait: bool = True) -> None:
        # short: a Unix socket's path has 107 bytes at most
        self.folder = Path(tempfile.mkdtemp(prefix="fs-"))
        self.work = self.folder / "work"
        self.work.mkdir()
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self._log = (self.folder / "log").open("w")
        source = TINY_FLAGS if model is None else (str(model), "--load-format", "dummy")
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flashstep", *self.command, *source, "--port", "0", *flags],
            cwd=self.work,
            env=environment(TMPDIR=str(self.temporary), PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        if wait:
            self._await_ready()

    def _await_ready(self) -> None:
        assert self.process.stdout is not None
        announced = self.process.stdout.readline()
        self.ready_s = time.monotonic() - self._started
        if not announced:
            status, log = self.process.wait(PATIENCE_S), self.log()
            self.remove()
            raise RuntimeError(f"the server ended with {status}: {log}")
        self.url = announced.split(" is served at ")[1].split("/v1")[0]
        self.host, self.port = self.url.removeprefix("http://").split(":")
        self.engine_pid = self.engine()
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        self.model = self.client.models.list().data[0].id

    def engine(self) -> int:
        """The engine's process id; waits until it is started."""
        found: list[int] = []

        def started() -> bool:
            found.extend(pid for pid in self.children() if b"spawn_main" in _command(pid))
            return bool(found)

        await_that(started)
        return found[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def leftovers(self) -> list[str]:
        """What stands in the temporary folder: the sockets' folder, while it runs."""
        return sorted(file.name for file in self.temporary.iterdir())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the server process (not the group), wait for its end, give its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def remove(self) -> None:
        """End whatever still runs and delete the folder."""
        if self.process.poll() is None:
            self.stop()
        if hasattr(self, "client"):
            self.client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        shutil.rmtree(self.folder)

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded body; ``body`` as bytes goes as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._opened(
            urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        )

    def get(self, path: str) -> tuple[int, Any]:
        return self._opened(urllib.request.Request(self.url + path))

    def opened(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPConnection:
        """A connection whose request is sent and whose answer nobody has read."""
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps(body))
        return connection

    def metric(self, name: str) -> float:
        """The sum over the samples of a metric."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))
        )

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, no block is owned, as the newest figures say."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    @staticmethod
    def _opened(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, _decoded(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        return body.decode()


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
