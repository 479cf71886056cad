"""A running server with a stub engine, real sockets all the way; scripts for the stub; an ``openai`` client."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tokenizers import Tokenizer

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.server import ServerOptions
from flashstep.engram.token_map import TokenMap
from tests.server import stub_engine
from tests.server.served import Served

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "flashstep" / "tiny" / "tokenizer.json"
MODEL = "stub"
PATIENCE_S = 60.0  # for anything that must happen; a failure, not a measure


class Server:
    """A server process. ``base`` is its URL without /v1; ``log`` is where its stderr goes, if not to ours."""

    def __init__(
        self,
        scripts: Path,
        *,
        fingerprint: str | None = None,
        serving: dict[str, Any] | None = None,
        log: Path | None = None,
        **engine: Any,
    ) -> None:
        self.scripts = scripts
        self.tokenizer = TextTokenizer.from_file(TOKENIZER)
        self.encoder = ChatEncoder(self.tokenizer)
        words = self.tokenizer.encode(
            "the quick brown fox jumps over the lazy dog and then it sleeps for a while"
        )
        if fingerprint is None:
            fingerprint = TokenMap.build(Tokenizer.from_file(str(TOKENIZER))).fingerprint
        options = Served(
            tokenizer=str(TOKENIZER),
            engine=stub_engine.Options(
                folder="",
                fingerprint=fingerprint,
                scripts=str(scripts),
                words=words,
                vocab_size=self.tokenizer.num_ids,
                **engine,
            ),
            server=ServerOptions(served_model_name=(MODEL, "alias"), port=0, **serving or {}),
        )
        command = [sys.executable, "-m", "tests.server.served", msgspec.json.encode(options).decode()]
        with nullcontext() if log is None else log.open("w") as stderr:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        if not line:
            raise RuntimeError(f"the server ended with {self._process.wait(PATIENCE_S)}")
        port, engine_pid = line
        self.port = int(port)
        self.engine_pid = int(engine_pid)
        self.base = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(
            base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(PATIENCE_S)

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)

    def script(self, name: str, output: str | Sequence[Sequence[int]], **options: Any) -> dict[str, str]:
        """Write a script and give the ``extra_body`` that asks for it. A text becomes one token a step."""
        runs = [[token] for token in self.tokenizer.encode(output)] if isinstance(output, str) else output
        whole = self.scripts / f"{name}.new"
        whole.write_text(json.dumps({"runs": runs, **options}))
        for left in (*self.scripts.glob(f"{name}.go*"), self.scripts / f"{name}.prompt"):
            left.unlink(missing_ok=True)
        whole.replace(self.scripts / f"{name}.json")  # the stub may be reading the one before
        return {"cache_salt": name}

    def was_asked(self, name: str) -> bool:
        """Whether a request of the script has come to the engine since it was written."""
        return (self.scripts / f"{name}.prompt").exists()

    def release(self, name: str, step: int) -> None:
        """Let the requests of a script go on that wait before ``step`` (one of its ``holds``)."""
        (self.scripts / f"{name}.go{step}").touch()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and decoded body; ``body`` as bytes goes as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data=data, headers={"Content-Type": "application/json", **headers}
        )
        return _opened(request)

    def get(self, path: str) -> tuple[int, Any]:
        return _opened(urllib.request.Request(self.base + path))

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of a metric that carry ``labels``."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = 0.0
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")) and all(
                label in line for label in wanted
            ):
                found += float(line.rsplit(" ", 1)[1])
        return found


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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not TOKENIZER.exists():
        pytest.skip(f"{TOKENIZER} is absent")
    made = Server(tmp_path_factory.mktemp("scripts"))
    yield made
    made.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers that a test may break."""
    made: list[Server] = []

    def make(**engine: Any) -> Server:
        made.append(Server(tmp_path, **engine))
        return made[-1]

    yield make
    for one in made:
        one.stop()
