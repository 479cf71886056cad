"""One choice on its own: counts, the stop string that ends a request at once, what a hang-up leaves."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from flashstep.chat.parse import TextParser
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.ipc.client import OutputStream
from flashstep.ipc.messages import Ready, RequestOutput
from flashstep.request import SamplingParams
from flashstep.server.choices import Choice, Failed, Piece, UsageSum, usage
from flashstep.server.metrics.registry import Metrics
from tests.server.conftest import TOKENIZER


class ScriptedStream:
    """What a Choice needs of an OutputStream."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs = list(outputs)
        self.id = "r-0"
        self.params = SamplingParams(max_tokens=8)
        self.closed = False
        self.done = False

    async def __anext__(self) -> RequestOutput:
        if self.closed or not self._outputs:
            raise StopAsyncIteration
        output = self._outputs.pop(0)
        self.done = output.finish_reason is not None
        return output

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    if not TOKENIZER.exists():
        pytest.skip(f"{TOKENIZER} is absent")
    return TextTokenizer.from_file(TOKENIZER)


@pytest.fixture
def metrics() -> Metrics:
    ready = Ready(
        max_model_len=8,
        max_num_seqs=1,
        num_blocks=1,
        block_size=2,
        hit_policy="exact",
        vocab_size=9,
        token_map_fingerprint="",
    )
    return Metrics("m", ready=ready, stats=lambda: None)


def choice(tokenizer: TextTokenizer, metrics: Metrics, stream: ScriptedStream, **options: Any) -> Choice:
    parser = TextParser(tokenizer.detokenizer(), **options)
    return Choice(
        cast(OutputStream, stream),
        parser,
        index=0,
        prompt_tokens=4,
        keep_stop=False,
        metrics=metrics,
    )


def output(*tokens: int, **fields: Any) -> RequestOutput:
    return RequestOutput(id="r", tokens=tokens, **fields)


async def pieces(of: Choice) -> list[Piece]:
    return [piece async for piece in of]


async def test_a_stop_string_closes_the_stream_at_once(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    ids = tokenizer.encode("one STOP two three")
    stream = ScriptedStream([output(*ids), output(5), output(6, finish_reason="length")])
    made = choice(tokenizer, metrics, stream, stop=["STOP"])
    (last,) = await pieces(made)
    assert (last.delta.content, last.finish_reason, last.stop_reason) == ("one ", "stop", "STOP")
    assert stream.closed
    assert tokenizer.decode(last.tokens).endswith("STOP")
    assert made.completion_tokens == len(last.tokens) < len(ids)


async def test_the_stop_token_counts_and_does_not_show(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    ids = tokenizer.encode("a b")
    made = choice(tokenizer, metrics, ScriptedStream([output(*ids, 1, finish_reason="stop", stop_token=1)]))
    (last,) = await pieces(made)
    assert (last.delta.content, made.completion_tokens) == ("a b", len(ids) + 1)


async def test_a_hang_up_is_an_abort(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    stream = ScriptedStream([output(5, cached_tokens=2), output(6)])
    made = choice(tokenizer, metrics, stream)
    await anext(made)
    made.close()
    assert (made.finish_reason, stream.closed) == ("abort", True)
    assert await pieces(made) == []
    made.close()
    assert metrics.text().count(b'finished_reason="abort",model_name="m"} 1.0') == 1


async def test_an_error_is_raised_and_counted(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    made = choice(tokenizer, metrics, ScriptedStream([output(finish_reason="error")]))
    with pytest.raises(Failed):
        await anext(made)
    made.close()
    assert made.finish_reason == "error"


async def test_usage_counts_a_prompt_once(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    made = []
    for cached in (2, 4):
        one = choice(
            tokenizer,
            metrics,
            ScriptedStream([output(5, 6, finish_reason="length", cached_tokens=cached, replayed_tokens=1)]),
        )
        await pieces(one)
        one.index = len(made)
        made.append(one)
    total = usage(made, n=2, reasoning=False)
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (4, 4, 8)
    assert (total.prompt_cache_hit_tokens, total.prompt_cache_miss_tokens) == (2, 2)
    assert total.prompt_tokens_details.replayed_tokens == 1
    assert usage(made, n=1, reasoning=False).prompt_tokens == 8


def test_usage_is_kept_up_choice_by_choice(tokenizer: TextTokenizer, metrics: Metrics) -> None:
    """Only the choice that has come on is looked at."""
    choices = [choice(tokenizer, metrics, ScriptedStream([])) for _ in range(4)]
    for index, one in enumerate(choices):
        one.index = index
        one.completion_tokens, one.cached_tokens = 10 + index, 2
    told = UsageSum(choices, n=2, reasoning=False)
    told.take(choices[3])
    assert told.usage().completion_tokens == 13, "nobody has looked at the others"
    for one in (*choices, choices[0]):
        told.take(one)
    assert told.usage() == usage(choices, n=2, reasoning=False)
    choices[1].completion_tokens += 5
    told.take(choices[1])
    assert told.usage().completion_tokens == 10 + 11 + 12 + 13 + 5
    assert told.usage().prompt_tokens_details.cached_tokens == 4, "of the first of each prompt"
