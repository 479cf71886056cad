"""Log-probabilities speak of the model: whatever bias, penalty, temperature or grammar chose a token, its own are told.

The direct computation is the same model reading prompt and answer as one prompt, with no option at all; fp32, equal or not.
"""

import math
from typing import Any

import pytest
import torch

from flashstep.chat import grammar
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request, SamplingParams, TokenLogprob
from flashstep.runner.build import build_runner

PROMPT = "Anna has 12 pens and buys 4 boxes with 6 pens each."
COUNT = 5


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(tiny_model() / "tokenizer.json")


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def engine(request: pytest.FixtureRequest) -> Engine:
    torch.set_num_threads(1)
    drafts = SpeculativeOptions(num_speculative_tokens=request.param) if request.param else None
    config = EngineConfig(
        model=tiny_model(),
        max_num_seqs=8,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 25,
        speculative=drafts,
        enable_prefix_caching=False,
    )
    return Engine(build_runner(config), seed=0)


def answered(engine: Engine, prompt: tuple[int, ...], **params: Any) -> tuple[list[int], list[TokenLogprob]]:
    """The tokens of the answer, and all log-probabilities that came: the prompt's, then the answer's."""
    one = Request(id="r", prompt=prompt, params=SamplingParams(**params))
    outputs = engine.generate([one])["r"]
    scores = [item for output in outputs for item in output.prompt_logprobs]
    scores += [item for output in outputs for item in output.logprobs]
    return [token for output in outputs for token in output.tokens], scores


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7, "top_p": 0.9, "seed": 1},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0, "seed": 2},
    "bias": {"logit_bias": {"a": -100.0, "b": 100.0}, "seed": 3},
    "masked": {"ignore_eos": True, "min_tokens": 10, "top_k": 1, "seed": 4},
    "bad_words": {"bad_words": "the", "seed": 5},
    "grammar": {"constraint": "(yes|no|never), [0-9]{8}", "seed": 6},
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_the_models_own(engine: Engine, tokenizer: TextTokenizer, name: str) -> None:
    params = {"max_tokens": 12, "temperature": 1.0, "logprobs": COUNT, **CASES[name]}
    if "constraint" in params:
        params["constraint"] = grammar.constraint(grammar.regex(params["constraint"]), after=None)
    if "bad_words" in params:
        params["bad_words"] = (tuple(tokenizer.encode(" the")),)
    if "logit_bias" in params:
        values = {"a": tokenizer.encode(" and")[0], "b": tokenizer.encode("\U0001f642")[0]}
        params["logit_bias"] = {values[key]: bias for key, bias in params["logit_bias"].items()}
    prompt = tuple(tokenizer.encode(PROMPT))
    tokens, scores = answered(engine, prompt, **params)
    assert [item.token for item in scores] == tokens and len(tokens) >= 4
    _, direct = answered(engine, (*prompt, *tokens), max_tokens=1, prompt_logprobs=COUNT)
    assert scores == direct[-len(tokens) :]
    for item in scores:
        assert len(item.top) == COUNT and [rank for _, _, rank in item.top] == [1, 2, 3, 4, 5]
        assert all(math.isfinite(value) for value in (item.logprob, *(value for _, value, _ in item.top)))
    if name in ("bias", "grammar"):
        assert any(item.rank > COUNT for item in scores), "the option chose what the model would not have"
