"""Steps that the device decides by itself give what the host's give, token for token, whoever joins, leaves or is preempted.

On a CPU the same function runs without graphs. Every story is run twice over the same model: with ``decode``, and without it.
"""

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from flashstep.cache.pool import CachePool
from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.runner.build import build_runner
from flashstep.runner.decode import Form, sizes
from flashstep.runner.runner import ModelRunner
from flashstep.runner.staging import to_device
from flashstep.weights.dummy import write_dummy
from tests.e2e.test_engine import Story, prompt, request, tokens
from tests.runner.conftest import DEVICES, write_tokenizer
from tests.speculate.memory import Memory
from tests.weights.conftest import tiny_json

DRAFTS = 5
METHODS = [
    None,
    SpeculativeOptions(),
    SpeculativeOptions(num_speculative_tokens=2),
    SpeculativeOptions(
        rejection_sample_method=RejectionSampleMethod.SYNTHETIC, synthetic_acceptance_length=3.4
    ),
    SpeculativeOptions(num_speculative_tokens_per_batch_size=((1, 2, 5), (3, 4, 2), (5, 8, 0))),
]

SYNTHETIC = [
    options
    for options in METHODS
    if options is not None and options.rejection_sample_method is RejectionSampleMethod.SYNTHETIC
]
# Where the number of tokens of a step or synthetic acceptance shows which tokens were drafted
DRAFTS_DIFFER = pytest.mark.xfail(
    reason="seen on a GPU and not explained: other tokens from the host's steps than from the device's, presumably "
    "because the two draft otherwise (docs/log.md, 2026-12-01)",
    strict=False,
)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(dspark_block_size=DRAFTS), seed=11)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=DEVICES)
def make(drafting: Path, request: pytest.FixtureRequest) -> Callable[..., ModelRunner]:
    def build(**options: object) -> ModelRunner:
        gc.collect()  # what an earlier runner has pinned is given back now, and not while graphs are captured
        defaults = {
            **request.param,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 40,
            "max_model_len": 128,
            "block_size": 4,
            "kv_cache_memory_bytes": 8 << 20,
        }
        return build_runner(EngineConfig(model=drafting, **(defaults | options)))

    return build


class Counted:
    """Counts the steps that a runner leaves to its decode step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps = 0
        assert runner.decode is not None
        launch = runner.decode.launch

        def counting(form: Form) -> torch.Tensor:
            self.steps += 1
            return launch(form)

        runner.decode.launch = counting


def test_nothing_is_collected_while_graphs_are_captured(
    make: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runner's tables would be unpinned in the middle of a capture; what is garbage already goes before."""
    decode = make().decode
    assert decode is not None
    gone = weakref.ref(_Cycle())  # stands for a runner that only the collector frees
    enabled = []
    monkeypatch.setattr(decode, "capture_form", lambda form: enabled.append((gc.isenabled(), gone() is None)))
    decode.capture_all()
    assert set(enabled) == {(False, True)} and gc.isenabled()


class _Cycle:
    def __init__(self) -> None:
        self.myself = self


def on_the_host(runner: ModelRunner) -> ModelRunner:
    """A runner over the same model that resolves every step itself."""
    return ModelRunner(
        runner.facts,
        model=runner._model,
        batches=runner._batches,
        vocabulary=runner._vocabulary,
        drafter=runner.drafter,
    )


def story(
    runner: ModelRunner, arrivals: Sequence[tuple[int, dict]], *, aborted: dict[int, str] | None = None
) -> dict[str, tuple]:
    """What each request is told, steps launched ahead; ``arrivals`` are (step, request's options), ``aborted`` ids by step."""
    engine = Engine(runner, seed=0)
    told = Launching(engine)
    waiting = [
        (step, request(f"r{n}", **({"seed": n, "max_tokens": 20} | options)))
        for n, (step, options) in enumerate(arrivals)
    ]
    step = 0
    while waiting or engine.has_work:
        told.add(*(each for at, each in waiting if at == step))
        waiting = [pair for pair in waiting if pair[0] > step]
        if aborted and step in aborted:
            told.abort(aborted[step])
        told.step()
        step += 1
    engine.check_integrity()
    return {
        name: (tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_token)
        for name, outputs in told.outputs.items()
    }


class Launching(Story):
    """Launches a step before it asks for the result of the one before."""

    def step(self) -> None:
        while len(self._planned) < 2 and (planned := self.engine.plan()) is not None:
            self._planned.append(self.engine.launch(planned))
        if self._planned:
            self._take(self.engine.commit(self._planned.popleft().result()))


def both(
    runner: ModelRunner, arrivals: Sequence[tuple[int, dict]], **more: object
) -> tuple[dict[str, tuple], int]:
    """What the story tells, the same both ways; and how many steps the device decided."""
    expected = story(on_the_host(runner), arrivals, **more)
    counted = Counted(runner)
    given = story(runner, arrivals, **more)
    assert given == expected
    return given, counted.steps


@pytest.mark.parametrize("policy", list(HitPolicy))
@pytest.mark.parametrize("options", METHODS, ids=["none", "k5", "k2", "synthetic", "by_batch"])
def test_tokens_are_those_of_the_hosts_steps(
    make: Callable[..., ModelRunner],
    options: SpeculativeOptions | None,
    policy: HitPolicy,
    request: pytest.FixtureRequest,
) -> None:
    """Greedy, drawn and cut rows side by side, ends by length in mid-step, arrivals while others decode."""
    runner = make(speculative=options, hit_policy=policy)
    if runner._batches.device.type == "cuda" and options in SYNTHETIC:
        request.applymarker(DRAFTS_DIFFER)
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "min_tokens": 6},
    ]
    arrivals = [
        (3 * n, {"ids": prompt(length, seed=n), "max_tokens": 12 + n, **kinds[n % len(kinds)]})
        for n, length in enumerate((1, 9, 33, 2, 17, 40, 5))
    ]
    _, steps = both(runner, arrivals)
    assert steps > 15


def test_a_small_pool_preempts_and_slots_change_hands(make: Callable[..., ModelRunner]) -> None:
    runner = make(speculative=SpeculativeOptions(), num_blocks_override=22, max_model_len=60, max_num_seqs=3)
    arrivals = [
        (n, {"ids": prompt(14 + n, seed=n), "max_tokens": 30, "temperature": n % 2}) for n in range(6)
    ]
    _, steps = both(runner, arrivals)
    assert steps > 15


def test_stops_and_aborts(make: Callable[..., ModelRunner], request: pytest.FixtureRequest) -> None:
    """A request that has ended stands in one more step, which changes nothing for anybody."""
    if make()._batches.device.type == "cuda":
        request.applymarker(DRAFTS_DIFFER)
    plain, _ = both(make(), [(0, {"ids": prompt(9), "temperature": 1.0})])
    stop = plain["r0"][0][7]
    arrivals = [
        (0, {"ids": prompt(9), "temperature": 1.0, "stop_token_ids": (stop,)}),
        (0, {"ids": prompt(12, seed=2), "max_tokens": 30}),
        (5, {"ids": prompt(7, seed=3), "max_tokens": 30, "temperature": 0.5}),
    ]
    for options in (None, SpeculativeOptions()):
        given, _ = both(make(speculative=options), arrivals, aborted={9: "r1"})
        assert given["r0"][1:] == ("stop", stop) and given["r1"][1] == "abort"


def test_the_context_ends_in_mid_step(make: Callable[..., ModelRunner]) -> None:
    """Rows of drafts that a request has no room for stand behind the last position of its tables."""
    runner = make(speculative=SpeculativeOptions(), max_model_len=40)
    given, _ = both(runner, [(0, {"ids": prompt(n), "max_tokens": 99}) for n in (20, 33, 39)])
    assert all(len(told[0]) == 40 - n for told, n in zip(given.values(), (20, 33, 39), strict=True))


def test_what_the_device_cannot_do_goes_through_the_host(make: Callable[..., ModelRunner]) -> None:
    """Penalties and log-probabilities beside plain requests: steps change sides, tokens do not."""
    arrivals = [
        (0, {"ids": prompt(9), "max_tokens": 40}),
        (4, {"ids": prompt(5, seed=1), "max_tokens": 6, "presence_penalty": 1.0, "temperature": 1.0}),
        (14, {"ids": prompt(30, seed=2), "max_tokens": 5, "logprobs": 1}),
    ]
    _, steps = both(make(speculative=SpeculativeOptions()), arrivals)
    assert 5 < steps < 40


def test_rows_that_pad_a_step_write_nothing(drafting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's rows: not a byte of poisoned memory changes, nor a slot's numbers."""
    config = EngineConfig(
        model=drafting, max_num_seqs=6, max_model_len=128, block_size=4, kv_cache_memory_bytes=1 << 20,
        speculative=SpeculativeOptions(),
    )  # fmt: skip
    memory = Memory.build(config, monkeypatch)
    decode = memory.runner.decode
    assert decode is not None
    story(memory.runner, [(0, {"ids": prompt(9), "max_tokens": 6})])
    before = everything(memory.pool)
    rows, tables = decode.state.rows_SF.clone(), decode.state.tables_2SB.clone()
    letter = decode.state.blank(3)
    decode.state.inbox[: len(letter)] = letter
    outcome = decode.run(Form(3, DRAFTS, DRAFTS))
    assert outcome[:, :2].eq(0).all()
    assert torch.equal(decode.state.rows_SF, rows) and torch.equal(decode.state.tables_2SB, tables)
    assert all(torch.equal(now, then) for now, then in zip(everything(memory.pool), before, strict=True))


def everything(pool: CachePool) -> list[torch.Tensor]:
    """A copy of all its bytes."""
    groups = (pool._window, pool._compressed, pool._index_keys, pool._tail)
    return [tensor.clone().view(torch.uint8) for group in groups for tensor in group.values()]


def test_padded_steps_are_the_same(make: Callable[..., ModelRunner]) -> None:
    """As a graph would: every step padded to the number of slots."""
    runner = make(speculative=SpeculativeOptions())
    decode = runner.decode
    assert decode is not None
    decode.form = lambda requests, *, verified, proposed, cuts: Form(6, DRAFTS, proposed, True)
    order = random.Random(1)
    arrivals = [
        (order.randint(0, 12), {"ids": prompt(order.randint(1, 30), seed=n), "temperature": n % 2})
        for n in range(7)
    ]
    _, steps = both(runner, arrivals)
    assert steps > 10


def test_sizes_of_graphs() -> None:
    assert sizes(1) == [1] and sizes(5) == [1, 2, 3, 4, 5]
    found = sizes(256)
    assert found[:8] == list(range(1, 9)) and found[-1] == 256 and len(found) < 30
    assert all(later / earlier <= 1.26 for earlier, later in itertools.pairwise(found[7:]))


def test_a_copy_is_made_for_the_device() -> None:
    array = np.arange(6).reshape(2, 3)[:, ::2]
    assert to_device(array, torch.device("cpu")).tolist() == array.tolist()
