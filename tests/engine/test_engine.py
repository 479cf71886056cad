"""The engine in one process, over the checking fake runner."""

import random

import pytest

from flashstep.engine.engine import Engine
from tests.engine import fake
from tests.scheduler.driving import request
from tests.scheduler.fake_runner import expected


def engine(**options) -> Engine:
    return Engine(fake.build(fake.config(**options)), seed=0)


def tokens_of(outputs) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def test_generate_runs_requests_to_their_ends():
    chance = random.Random(0)
    requests = [
        request(f"r{i}", [chance.randrange(2, 95) for _ in range(chance.randrange(1, 60))], 20, seed=i)
        for i in range(20)
    ]
    one = engine()
    outputs = one.generate(requests)
    for item in requests:
        tokens, reason = expected(item, vocab_size=97, max_model_len=256)
        assert tokens_of(outputs[item.id]) == tokens
        assert outputs[item.id][-1].finish_reason == reason
        first = outputs[item.id][0]
        assert first.cached_tokens is not None and first.prefill_s is not None and first.queued_s is not None
    one.check_integrity()
    assert not one.has_work


def test_a_seed_fixes_the_tokens_whatever_the_neighbours():
    """A14: alone, beside unseeded and seeded neighbours, and late."""
    target = request("r", (5, 6, 7), 32, seed=42, ignore_eos=True)
    alone = tokens_of(engine().generate([target])["r"])
    for neighbours in (1, 3):
        others = [request(f"n{i}", (9, i + 2), 40, seed=i or None) for i in range(neighbours)]
        assert tokens_of(engine().generate([*others, target])["r"]) == alone
    late = engine()
    late.add(request("n", (9, 9), 40, ignore_eos=True))
    for _ in range(5):
        late.step()
    late.add(target)
    got = []
    while late.has_work:
        got += [token for output in late.step() if output.id == "r" for token in output.tokens]
    assert got == alone
    outputs = {
        tuple(tokens_of(engine().generate([request("r", (5, 6, 7), 32, seed=s, ignore_eos=True)])["r"]))
        for s in range(20)
    }
    assert len(outputs) >= 15


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them():
    """A25: four equal requests without a seed."""
    requests = [request(f"c{i}", (5, 6, 7), 16, ignore_eos=True) for i in range(4)]
    first, second = (engine().generate(requests) for _ in range(2))
    told = [tuple(tokens_of(first[item.id])) for item in requests]
    assert len(set(told)) >= 3
    assert told == [tuple(tokens_of(second[item.id])) for item in requests]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("r", ()), "prompt is empty"),
        (request("r", (5, 97)), "0..96"),
        (request("r", (-1,)), "0..96"),
        (request("r", (5,), temperature=-1.0), "temperature"),
        (request("r", (5,), logit_bias={97: 1.0}), "logit_bias"),
        (request("r", (5,) * 256), "256"),
    ],
)
def test_the_door_refuses_in_words(bad, words):
    one = engine()
    with pytest.raises(ValueError, match=words):
        one.add(bad)
    assert not one.has_work


def test_an_abort_ends_a_request_and_says_so():
    one = engine()
    one.add(request("r", (5, 6), 100, ignore_eos=True))
    one.step()
    (output,) = one.abort(["r", "unknown"])
    assert (output.id, output.finish_reason) == ("r", "abort")
    assert not one.has_work
    one.check_integrity()


def test_ignore_eos_goes_on_to_the_length():
    """A24."""
    (outputs,) = engine().generate([request("r", tuple(range(2, 42)), 20, ignore_eos=True)]).values()
    assert len(tokens_of(outputs)) == 20
    assert outputs[-1].finish_reason == "length"


def test_memory_stays_flat_over_a_thousand_requests():
    one = engine()
    runner = one._runner
    for number in range(1000):
        one.generate([request(f"r{number}", (2 + number % 90, number % 7 + 2, 5), 2)])
    assert len(runner.sequences) <= 2, "the runner forgets finished requests with the next plan"
    assert len(one._scheduler._jobs) == 0
    assert len(one._scheduler._gone) <= 1
    one.check_integrity()
