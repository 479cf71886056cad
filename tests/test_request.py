"""SamplingParams: every range of spec/serving.md F.3, each problem naming its field (case A22)."""

import math

import pytest

from flashstep.request import MAX_PROBLEMS, SamplingParams, problems

GOOD = [
    {"temperature": 0.0},
    {"top_p": 1e-6, "top_k": -1, "min_p": 1.0},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.01},
    {"logit_bias": {0: 100.0, 99: -100.0}},
    {"min_tokens": 8, "logprobs": 20, "prompt_logprobs": 0},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"bad_words": ((99,), (1, 2)), "stop_token_ids": (0, 99)},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2**63),
    ("min_p", -0.1),
    ("min_p", math.nan),
    ("presence_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("seed", 2**63),
    ("logit_bias", {100: 5.0}),
    ("logit_bias", {-1: 5.0}),
    ("logit_bias", {5: 1e9}),
    ("logit_bias", {5: math.nan}),
    ("stop_token_ids", (100,)),
    ("bad_words", ((),)),
    ("bad_words", ((1, -1),)),
]


@pytest.mark.parametrize("params", GOOD)
def test_good(params: dict) -> None:
    assert problems(SamplingParams(**{"max_tokens": 8, **params}), 100) == []


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad(field: str, value: object) -> None:
    (problem,) = problems(SamplingParams(**{"max_tokens": 8, field: value}), 100)
    assert problem.startswith(f"{field} ")


def test_all_problems_come_together() -> None:
    params = SamplingParams(max_tokens=8, temperature=-1, top_p=2, logit_bias={100: 1000.0})
    assert len(problems(params, 100)) == 4
    assert len(problems(SamplingParams(max_tokens=8, stop_token_ids=(100,) * 1000), 100)) == MAX_PROBLEMS
