"""What the engine answers to held-out prompts of the tiny model, on one device or the other, and the CPU's answers in a file.

``python -m tests.e2e.answers FILE`` writes what a CPU answers to the five hundred prompts of ``test_gpu.py``, which takes
minutes, and ``pytest --cpu-answers FILE`` reads them where a GPU is lent for fewer. The file names what it answers: prompts,
weights and settings. The references give the same bits on every CPU, so that it matters not where it was made.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request
from flashstep.runner.build import build_runner
from tests.speculate.tasks import requests

Answers = dict[str, tuple[int, ...]]
TOGETHER = 64  # requests of a batch
MANY = 500


def config(*, drafts: bool = False, **options: object) -> EngineConfig:
    return EngineConfig(
        **{
            "model": tiny_model(),
            "device": "cuda",
            "max_num_seqs": TOGETHER,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 1 << 28,
            "speculative": SpeculativeOptions() if drafts else None,
        }
        | options
    )


def answers(items: Sequence[Request], **options: object) -> Answers:
    engine = Engine(build_runner(config(**options)), seed=0)
    began = time.perf_counter()
    outputs = engine.generate(items)
    print(f"{options}: {time.perf_counter() - began:.1f} s")
    engine.check_integrity()
    return {key: tuple(token for output in many for token in output.tokens) for key, many in outputs.items()}


def greedy(count: int) -> list[Request]:
    return [item for task in requests(count, seed=5, temperature=0.0).values() for item in task]


def cpu_answers(items: Sequence[Request], file: Path | None) -> Answers:
    """From ``file``, if there is one and it answers ``items``; else computed."""
    if file is None:
        return answers(items, device="cpu")
    made = json.loads(file.read_text(encoding="utf-8"))
    assert made["of"] == _name_of(items), f"{file} answers other prompts, or those of other weights"
    return {key: tuple(tokens) for key, tokens in made["answers"].items()}


def _name_of(items: Sequence[Request]) -> str:
    digest = hashlib.sha256(msgspec.json.encode(list(items)))
    for file in sorted(tiny_model().iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    asked = greedy(MANY)
    made = {"of": _name_of(asked), "answers": answers(asked, device="cpu")}
    Path(sys.argv[1]).write_text(json.dumps(made), encoding="utf-8")
