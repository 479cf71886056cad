"""A dummy checkpoint of configuration A (every role, Engram on two layers), the oracle's view of it, and runners on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.runner.build import build_runner
from flashstep.runner.runner import ModelRunner
from flashstep.weights.dummy import write_dummy
from oracle import checkpoint as oracle_checkpoint
from tests.weights.conftest import tiny_json

VOCABULARY, COMPRESSED = 64, 50  # as tiny_json has them
# Options of an engine: the references, and the kernels of a GPU with its graphs, where rows must not see their number.
DEVICES = [
    pytest.param({"device": "cpu"}, id="cpu"),
    pytest.param({"device": "cuda", "batch_invariant": True}, id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(), seed=11)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, *, distinct: int = COMPRESSED) -> None:
    """A tokenizer of whole words, the last ones upper-case doubles of the first: a token map that is no identity."""
    words = [f"w{n}" for n in range(distinct)] + [f"W{n}" for n in range(VOCABULARY - distinct)]
    model = {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}), encoding="utf-8")


@pytest.fixture(scope="session")
def witness(checkpoint: Path) -> oracle_checkpoint.Checkpoint:
    return oracle_checkpoint.load(checkpoint)


@pytest.fixture(scope="session")
def make_runner(checkpoint: Path) -> Callable[..., ModelRunner]:
    def make(policy: HitPolicy = HitPolicy.EXACT, **options: object) -> ModelRunner:
        defaults = {
            "max_num_seqs": 6,
            "max_model_len": 256,
            "block_size": 4,
            "kv_cache_memory_bytes": 8 << 20,
        }
        return build_runner(EngineConfig(model=checkpoint, hit_policy=policy, **(defaults | options)))

    return make


@pytest.fixture(scope="session")
def exact(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner()


@pytest.fixture(scope="session")
def bounded(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner(HitPolicy.BOUNDED)
