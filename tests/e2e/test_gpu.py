"""The engine on a CUDA device: against the oracle, against the CPU, and with drafts. Kernels are what the table chooses."""

from pathlib import Path

import pytest
import torch

from flashstep.cli import main
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request
from flashstep.runner.build import build_runner
from tests.speculate.tasks import requests

pytestmark = pytest.mark.gpu
VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "model"
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "4096")
PROMPTS = 500
BATCH = 64


@pytest.mark.parametrize("name", ["tiny", "a_base", "d_release_like"])
def test_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows against the oracle, drafts against the oracle's, tokens with drafts against tokens without."""
    folder = tiny_model() if name == "tiny" else VECTORS / name / "ckpt"
    code = main(["check", str(folder), "--device", "cuda", *SMALL])
    print(capsys.readouterr().out)
    assert code == 0


def answers(device: str, items: list[Request], *, drafts: bool = False) -> dict[str, tuple[int, ...]]:
    config = EngineConfig(
        model=tiny_model(),
        device=device,
        max_num_seqs=BATCH,
        max_model_len=4096,
        kv_cache_memory_bytes=1 << 28,
        speculative=SpeculativeOptions() if drafts else None,
    )
    engine = Engine(build_runner(config), seed=0)
    found: dict[str, tuple[int, ...]] = {}
    for start in range(0, len(items), BATCH):
        for key, outputs in engine.generate(items[start : start + BATCH]).items():
            found[key] = tuple(token for output in outputs for token in output.tokens)
    return found


def test_greedy_tokens_are_those_of_the_cpu() -> None:
    """On at least 99% of prompts (issue 4); with drafts on the device, the same again."""
    items = [item for task in requests(PROMPTS, seed=5, temperature=0.0).values() for item in task]
    torch.set_num_threads(8)
    on_cpu, on_device, with_drafts = (
        answers("cpu", items), answers("cuda", items), answers("cuda", items, drafts=True)
    )  # fmt: skip
    same = sum(on_device[key] == tokens for key, tokens in on_cpu.items())
    print(f"{same} of {len(items)} prompts give the same tokens on CPU and device")
    assert same >= 0.99 * len(items)
    assert with_drafts == on_device
