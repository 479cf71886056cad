"""Scheduler and runner together, in one process, on a dummy checkpoint: against the oracle, and against themselves.

Steps overlap as in the engine's loop (a step is planned before the one before it has run), unless a test says otherwise.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import oracle.model as oracle
from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.engine.engine import Engine
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import build_runner
from flashstep.weights.dummy import write_dummy
from oracle import checkpoint as oracle_checkpoint
from tests.runner.conftest import write_tokenizer
from tests.weights.conftest import tiny_json

BLOCK, WINDOW = 4, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(), seed=11)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def make_engine(checkpoint: Path) -> Callable[..., Engine]:
    def make(**options: object) -> Engine:
        defaults = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "max_model_len": 256,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 8 << 20,
        }
        return Engine(build_runner(EngineConfig(model=checkpoint, **(defaults | options))), seed=0)

    return make


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * seed + length).choices(range(2, 64), k=length))


def request(name: str, ids: Sequence[int], **params: object) -> Request:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return Request(id=name, prompt=tuple(ids), params=SamplingParams(**params))


class Story:
    """Runs an engine with two steps in flight and gathers what each request was told."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._planned: deque = deque()

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.engine.add(each)
            self.outputs[each.id] = []

    def abort(self, *ids: str) -> None:
        self._take(self.engine.abort(ids))

    def step(self) -> None:
        """Plan as far ahead as two steps, run and commit the older one."""
        while len(self._planned) < 2 and (planned := self.engine.plan()) is not None:
            self._planned.append(planned)
        if self._planned:
            self._take(self.engine.commit(self.engine.run(self._planned.popleft())))

    def finish(self) -> dict[str, list[RequestOutput]]:
        while self.engine.has_work:
            self.step()
        self.engine.check_integrity()
        return self.outputs

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs[output.id].append(output)


def run(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    story = Story(engine)
    story.add(*requests)
    return story.finish()


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def told(outputs: list[RequestOutput]) -> tuple:
    """Everything that must not depend on company, chunks or memory."""
    return (
        tokens(outputs),
        [entry for output in outputs for entry in output.logprobs],
        [entry for output in outputs for entry in output.prompt_logprobs],
        outputs[-1].finish_reason,
    )


def check_greedy(witness: oracle_checkpoint.Checkpoint, ids: Sequence[int], generated: Sequence[int]) -> None:
    with torch.inference_mode():
        logits = oracle.forward(
            witness.config,
            witness.weights,
            torch.tensor([[*ids, *generated[:-1]]]),
            numerics=oracle.N2,
            token_map=witness.token_map,
        ).logits_BTV
    assert logits is not None
    assert logits[0, len(ids) - 1 :].argmax(dim=1).tolist() == list(generated)


def test_greedy_is_the_oracles(make_engine: Callable[..., Engine], checkpoint: Path) -> None:
    """Prompts of a token to several windows, among them one and a half blocks, all at once and chunked by the budget."""
    witness = oracle_checkpoint.load(checkpoint)
    requests = [request(f"p{n}", prompt(n)) for n in (1, 2, 3, 6, 7, 13, 33, 65)]
    outputs = run(make_engine(), *requests)
    for each in requests:
        assert outputs[each.id][-1].finish_reason == "length"
        check_greedy(witness, each.prompt, tokens(outputs[each.id]))


@pytest.mark.parametrize("policy", list(HitPolicy))
def test_preemption_changes_nothing(make_engine: Callable[..., Engine], policy: HitPolicy) -> None:
    """A13 without drafts: a pool of one and a half requests."""
    params = {"max_tokens": 16, "logprobs": 2}
    requests = [
        request(
            f"r{n}",
            prompt(8 if policy is HitPolicy.BOUNDED else 20 + n, seed=n),
            **params,
            temperature=n % 2,
            seed=n,
        )
        for n in range(4)
    ]
    # under the bounded policy a recomputation is an approximation beyond the window: only counts are compared there
    length = max(len(each.prompt) for each in requests) + 16
    small = make_engine(
        num_blocks_override=-(-length * 3 // 2 // BLOCK), max_model_len=length, hit_policy=policy
    )
    squeezed = run(small, *requests)
    roomy = run(make_engine(hit_policy=policy), *requests)
    assert sum(outputs[-1].preemptions for outputs in squeezed.values()) > 0
    assert sum(outputs[-1].preemptions for outputs in roomy.values()) == 0
    for name, outputs in squeezed.items():
        if policy is HitPolicy.EXACT:
            assert told(outputs) == told(roomy[name])
        else:
            assert len(tokens(outputs)) == 16
    assert small.stats().cache_usage == 0


def test_prompt_logprobs_survive_chunks_and_preemption(make_engine: Callable[..., Engine]) -> None:
    requests = [
        request(
            f"r{n}", prompt(30, seed=n), max_tokens=16, logprobs=1, prompt_logprobs=2, seed=3, temperature=1.0
        )
        for n in range(3)
    ]
    squeezed = run(
        make_engine(num_blocks_override=18, max_model_len=46, max_num_batched_tokens=13), *requests
    )
    assert sum(outputs[-1].preemptions for outputs in squeezed.values()) > 0
    for each in requests:
        reference = run(make_engine(max_num_batched_tokens=256), each)[each.id]
        assert told(squeezed[each.id]) == told(reference)
        assert len(told(reference)[2]) == 29


def test_seeds_whatever_the_company(make_engine: Callable[..., Engine]) -> None:
    """A14: alone, among others, arriving late, under another budget."""
    target = request("t", prompt(9), temperature=1.0, seed=42, max_tokens=8, logprobs=0)
    reference = told(run(make_engine(), target)["t"])
    others = [
        request(f"o{n}", prompt(11 + n, seed=n), temperature=1.0, seed=n or None, max_tokens=20)
        for n in range(4)
    ]
    for late, budget in ((0, 24), (3, 7)):
        story = Story(make_engine(max_num_batched_tokens=budget))
        story.add(*others)
        for _ in range(late):
            story.step()
        story.add(target)
        assert told(story.finish()["t"]) == reference


def test_children_of_a_prompt_differ_and_repeat(make_engine: Callable[..., Engine]) -> None:
    """A25, below the server: n children are n requests with seeds of their own."""
    children = [request(f"c{n}", prompt(9), temperature=1.5, seed=7 + n, max_tokens=10) for n in range(4)]
    first, second = (run(make_engine(), *children) for _ in range(2))
    assert len({tuple(tokens(outputs)) for outputs in first.values()}) == 4
    assert all(told(first[name]) == told(second[name]) for name in first)
    greedy = [request(f"g{n}", prompt(9), temperature=0.0, seed=7 + n, max_tokens=10) for n in range(4)]
    assert len({tuple(tokens(outputs)) for outputs in run(make_engine(), *greedy).values()}) == 1
    unseeded = [request(f"u{n}", prompt(9), temperature=1.5, max_tokens=10) for n in range(4)]
    assert len({tuple(tokens(outputs)) for outputs in run(make_engine(), *unseeded).values()}) == 4


def test_exact_hits_change_nothing(make_engine: Callable[..., Engine]) -> None:
    shared = prompt(40)
    requests = [request(f"r{n}", (*shared[: 40 - 7 * n], *prompt(5, seed=n)), logprobs=2) for n in range(5)]
    engine = make_engine()
    warm = {}
    for each in requests:
        warm |= run(engine, each)
    for each in requests:
        (first, *_), cold = warm[each.id], run(make_engine(enable_prefix_caching=False), each)[each.id]
        assert told(warm[each.id]) == told(cold)
        if each.id != "r0":
            assert first.cached_tokens is not None and first.cached_tokens >= len(each.prompt) - 5 - BLOCK
            assert first.replayed_tokens == 0
        assert cold[0].cached_tokens == 0


def test_bounded_hits_report_their_replay(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(hit_policy=HitPolicy.BOUNDED)
    shared = prompt(40)
    run(engine, request("a", shared))
    first = run(engine, request("b", (*shared, *prompt(5))))["b"][0]
    assert (first.cached_tokens, first.replayed_tokens) == (40, WINDOW)
    short = run(engine, request("c", (*shared[:WINDOW], *prompt(5, seed=3))))["c"][0]
    assert (short.cached_tokens, short.replayed_tokens) == (0, 0)


def test_stops_are_noticed_and_the_late_token_is_dropped(make_engine: Callable[..., Engine]) -> None:
    plain = tokens(run(make_engine(), request("a", prompt(13), max_tokens=20))["a"])
    stop = plain[5]
    outputs = run(make_engine(), request("a", prompt(13), max_tokens=20, stop_token_ids=(stop,)))["a"]
    assert tokens(outputs) == plain[: plain.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)


def test_abort_frees_everything_and_touches_nobody(make_engine: Callable[..., Engine]) -> None:
    keep = request("keep", prompt(17), max_tokens=20)
    reference = told(run(make_engine(), keep)["keep"])
    for moment in (0, 1, 3):
        engine = make_engine()
        story = Story(engine)
        story.add(
            request("gone", prompt(40, seed=1), max_tokens=50),
            keep,
            request("too", prompt(8, seed=2), max_tokens=50),
        )
        for _ in range(moment):
            story.step()
        story.abort("gone", "too", "nobody")
        # the id may come again at once
        story.add(request("gone", prompt(12, seed=4), max_tokens=4))
        outputs = story.finish()
        assert told(outputs["keep"]) == reference
        assert len(tokens(outputs["gone"])) == 4
        assert outputs["too"][-1].finish_reason == "abort"
        assert engine.stats().cache_usage == 0


def test_random_traffic_is_each_request_alone(make_engine: Callable[..., Engine]) -> None:
    """Arrivals, shared prefixes, aborts and a tight pool, all at random; every request that ends says what it says alone."""
    order = random.Random(5)
    shared = prompt(30, seed=9)
    requests = [
        request(
            f"r{n}",
            (*shared[: order.choice((0, 4, 11, 24, 30))], *prompt(order.randint(1, 20), seed=n)),
            temperature=order.choice((0.0, 1.0)),
            seed=n,
            max_tokens=order.randint(1, 14),
            logprobs=1,
            prompt_logprobs=order.choice((None, None, 1)),
            presence_penalty=order.choice((0.0, 1.0)),
        )
        for n in range(14)
    ]
    alone_engine = make_engine(enable_prefix_caching=False, max_num_batched_tokens=256)
    story = Story(
        make_engine(num_blocks_override=40, max_model_len=80, max_num_seqs=5, max_num_batched_tokens=17)
    )
    aborted = set()
    for each in requests:
        story.add(each)
        for _ in range(order.randint(0, 3)):
            story.step()
        if order.random() < 0.2:
            aborted.add(each.id)
            story.abort(each.id)
    outputs = story.finish()
    for each in requests:
        if each.id not in aborted:
            assert told(outputs[each.id]) == told(run(alone_engine, each)[each.id]), each.id
