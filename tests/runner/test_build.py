"""What cannot be served is refused before anything runs, with every reason at once."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flashstep.config.engine import EngineConfig
from flashstep.config.engram import EngramOptions
from flashstep.config.errors import ConfigError
from flashstep.kernels import TABLE
from flashstep.kernels.registry import Switch, choose
from flashstep.runner.build import build_runner, waits_for_host
from flashstep.runner.runner import ModelRunner
from tests.runner.conftest import write_tokenizer
from tests.runner.plans import Hand

SMALL = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


def refusal(folder: Path, **options: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_runner(EngineConfig(model=folder, **(SMALL | options)))
    return caught.value.problems


def test_all_reasons_come_together(folder: Path) -> None:
    write_tokenizer(folder, distinct=40)
    next(iter(folder.glob("*.safetensors"))).unlink()
    problems = "\n".join(refusal(folder, kernels="fast", max_model_len=10**9))
    assert "engram_compressed_vocab_size is 50" in problems
    assert "kernels is 'fast'" in problems
    assert "max_model_len is 1000000000; the checkpoint's limit is 4096" in problems
    assert "safetensors does not exist" in problems


def test_options_with_the_wrong_words(folder: Path) -> None:
    problems = refusal(folder, load_format="gguf", scheduling_policy="lifo")
    assert [p.split()[0] for p in problems] == ["load_format", "scheduling_policy"]


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_memory_bytes": 1 << 60}, {"num_blocks_override": 1 << 50}],
    ids=lambda o: next(iter(o)),
)
def test_more_memory_than_the_machine_has_is_refused(folder: Path, options: dict[str, int]) -> None:
    (problem,) = refusal(folder, **options)
    assert "this machine has" in problem and "Nearest that fits: " in problem


def test_mapped_tables_of_dummy_weights_are_refused(folder: Path) -> None:
    mapped = EngramOptions(dp_shared_memory=True)
    assert "lie in none" in refusal(folder, load_format="dummy", engram=mapped, device="cpu")[0]


def test_what_a_cpu_has_not(folder: Path) -> None:
    problems = refusal(folder, engram=EngramOptions(cpu_offload=False), numa_bind=True, device="cpu")
    assert "the device is the CPU, which has one memory" in problems[0]
    assert "--numa-bind: the device is the CPU" in problems[1]


@pytest.mark.parametrize("engram", ["{}", '{"dp_shared_memory": true}', '{"use_thp": true}'])
def test_tables_may_lie_anywhere(folder: Path, engram: str) -> None:
    options = EngramOptions.parse(engram)
    runner = build_runner(EngineConfig(model=folder, engram=options, device="cpu", **SMALL))
    assert (
        Hand(runner).alone(range(20), outputs=3).tokens
        == Hand(runner).alone(range(20), outputs=3, cuts=[7]).tokens
    )


def test_dummy_weights_are_the_seeds(
    folder: Path, make_runner: Callable[..., ModelRunner], checkpoint: Path
) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    tokens = [
        Hand(build_runner(EngineConfig(model=folder, load_format="dummy", seed=seed, **SMALL)))
        .alone(range(9), outputs=4)
        .tokens
        for seed in (11, 12)
    ]
    assert (
        tokens[0] == Hand(make_runner()).alone(range(9), outputs=4).tokens
    )  # the checkpoint was written with seed 11
    assert tokens[1] != tokens[0]


def test_generation_config_adds_eos_ids(folder: Path) -> None:
    """A24: every EOS id ends a request, and every one is masked before min_tokens."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [1, 5], "temperature": 0.6}))
    runner = build_runner(EngineConfig(model=folder, **SMALL))
    assert runner.facts.eos_token_ids == (1, 5)
    live = Hand(runner).alone(range(9), outputs=4, min_tokens=3, logit_bias={1: 90.0, 5: 100.0, 63: 80.0})
    assert live.tokens == [63, 63, 63, 5]
    file.write_text(json.dumps({"eos_token_id": 64}))
    assert "eos_token_id is 64; it must be a token id in 0..63" in refusal(folder)[0]


def test_progress_is_reported(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_runner(EngineConfig(model=folder, **SMALL), progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")[0]


def test_graphs_are_made_where_every_op_that_a_model_calls_has_a_fast_row() -> None:
    hopper = frozenset({"cuda", "sm90", "nvcc"})
    assert not waits_for_host(choose(TABLE, facts=hopper, switch=Switch()))
    forced = choose(TABLE, facts=hopper, switch=Switch(ops=frozenset({"gemm.lin8"})))
    assert waits_for_host(forced) == ["gemm.lin8"]
    assert "gemm.lin8" in waits_for_host(choose(TABLE, facts=frozenset({"cuda"}), switch=Switch()))


def test_every_op_has_a_faster_row_than_its_reference() -> None:
    rows = Counter(row.op for row in TABLE)
    assert not [op for op, count in rows.items() if count == 1]
