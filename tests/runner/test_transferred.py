"""Prompts whose cache is handed over: with the records that another request has computed, tokens are those of computing them.

The records are copied block by block from a request of the same prompt in the same pool, which is what a hand-over between two
engines does on the way.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashstep.cache.pool import CachePool
from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import Built, build
from flashstep.weights.dummy import write_dummy
from tests.runner.conftest import DEVICES, write_tokenizer
from tests.runner.test_runner import prompt
from tests.weights.conftest import tiny_json


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(dspark_block_size=5), seed=11)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=DEVICES)
def make(drafting: Path, request: pytest.FixtureRequest) -> Callable[..., Built]:
    def made(**options: object) -> Built:
        defaults = {
            **request.param,
            "max_num_seqs": 4,
            "max_model_len": 128,
            "block_size": 4,
            "kv_cache_memory_bytes": 8 << 20,
            "fill_cache": True,
            "enable_prefix_caching": False,
        }
        return build(EngineConfig(model=drafting, **(defaults | options)))

    return made


class HandedOver:
    """In the place of ``FilledCache``: records of the request in slot ``source``."""

    def __init__(self, built: Built, *, source: int) -> None:
        self._pool: CachePool = built.pool
        self._slots = built.runner._slots
        self._source = source
        self.calls = 0

    def fill(self, slot: int, blocks: torch.Tensor, window_blocks: torch.Tensor) -> None:
        self.calls += 1
        both = (self._slots.blocks, self._slots.window_blocks)
        theirs, windows = (torch.from_numpy(table[self._source, : len(blocks)]).to(blocks) for table in both)
        for tensor in (*self._pool._compressed.values(), *self._pool._index_keys.values()):
            tensor[blocks] = tensor[theirs]
        for tensor in self._pool._window.values():
            tensor[window_blocks] = tensor[windows[-len(window_blocks) :]]
        for tensor in self._pool._tail.values():
            tensor[slot] = tensor[self._source]


def asked(name: str, ids: list[int], **params: object) -> Request:
    options = {"max_tokens": 14, "temperature": 1.0, "seed": 3, "ignore_eos": True} | params
    return Request(id=name, prompt=tuple(ids), params=SamplingParams(**options))


@pytest.mark.parametrize("speculative", [None, SpeculativeOptions()])
@pytest.mark.parametrize("policy", list(HitPolicy))
def test_handed_over_is_computed(
    make: Callable[..., Built], policy: HitPolicy, speculative: SpeculativeOptions | None
) -> None:
    """Odd and even lengths, inside one window and far beyond it: windows, entries, index keys, tails and draft windows."""
    built = make(hit_policy=policy, speculative=speculative)
    engine = Engine(built.runner, seed=0)
    built.runner._filled = handed = HandedOver(built, source=0)
    lengths = (2, 3, 9, 20, 65)
    for length in lengths:
        built.pool.poison()
        computed, taken = f"computed-{length}", f"handed-{length}"
        told: dict[str, list[int]] = {computed: [], taken: []}
        engine._scheduler.add(asked(computed, prompt(length)))  # by the back door: its prompt runs
        for output in engine.step():
            told[output.id] += output.tokens
        engine.add(asked(taken, prompt(length)))
        acceptance = {}
        while engine.has_work:
            for output in engine.step():
                told[output.id] += output.tokens
                acceptance[output.id] = output.acceptance
        assert len(told[computed]) == 14 and told[taken] == told[computed], length
        assert acceptance[taken] == acceptance[computed], "a draft has read another context"
        engine.check_integrity()
    assert handed.calls == len(lengths)
    assert engine.stats().transferred_tokens == sum(length - 1 for length in lengths)


def test_steps_ahead_and_filled_values(make: Callable[..., Built]) -> None:
    """As the loop runs it, over poisoned memory: every row reads what was filled, or log-probabilities would not be numbers."""
    for speculative in (None, SpeculativeOptions()):
        built = make(speculative=speculative, fill_cache_std=0.3)
        built.pool.poison()
        engine = Engine(built.runner, seed=0)
        requests = [
            asked(f"r{n}", prompt(length), logprobs=1) for n, length in enumerate((1, 2, 50, 51, 100))
        ]
        outputs = engine.generate(requests)
        for request in requests:
            logprobs = [one.logprob for output in outputs[request.id] for one in output.logprobs]
            assert len(logprobs) == 14 and all(value <= 0 for value in logprobs)
        assert engine.stats().transferred_tokens == 0 + 1 + 49 + 50 + 99
        engine.check_integrity()


def test_prefix_hits_go_before_what_is_handed_over(make: Callable[..., Built]) -> None:
    engine = Engine(make(enable_prefix_caching=True).runner, seed=0)
    engine.generate([asked("first", prompt(41))])
    engine.generate([asked("again", prompt(41))])
    stats = engine.stats()
    assert stats.cached_tokens == 40 and stats.transferred_tokens == 40


def test_an_engine_without_anybody_who_hands_over_refuses(make: Callable[..., Built]) -> None:
    engine = Engine(make(fill_cache=False).runner, seed=0)
    with pytest.raises(ValueError, match="no records come from outside"):
        engine.add(Request(id="r", prompt=(1, 2, 3), params=SamplingParams(max_tokens=2), transferred=2))
    filled = Engine(make().runner, seed=0)
    with pytest.raises(ValueError, match="prompt_logprobs needs every row"):
        filled.add(asked("r", prompt(5), prompt_logprobs=0))
