"""A ``vllm serve`` line behind ``flashstep``: it serves what it says, to the client that it was written for."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving import TINY, TRAINED, UNTRAINED, Served

LINE = (
    "-tp 1 --pipeline_parallel_size=1 --tokenizer-mode deepseek_v41 --reasoning-parser deepseek_v41 "
    "--tool-call-parser deepseek_v41 --enable-auto-tool-choice --enable-prompt-tokens-details --trust-remote-code "
    "--kv-cache-dtype fp8 --max-model-len 2k --max-num-seqs 8 --max-num-batched-tokens 1k --kv-cache-memory-bytes 64m "
    "--enable-chunked-prefill --enable-prefix-caching --async-scheduling --no-swa-bounded-replay --disable-log-stats "
    "--distributed-executor-backend mp -O3 -cc.cudagraph_mode=FULL_DECODE_ONLY --limit-mm-per-prompt.image 0 "
    "--structured-outputs-config.backend guidance --spec-tokens 3 --speculative-config.method dspark "
    "--default-chat-template-kwargs.thinking false --override-generation-config.temperature 0"
).split()


class Pasted(Served):
    command = ("vllm", "serve")


@pytest.fixture(scope="module")
def pasted() -> Iterator[Served]:
    served = Pasted(None, str(TINY), *LINE)
    yield served
    served.remove()


@pytest.mark.skipif(not TRAINED, reason=UNTRAINED)
def test_it_answers_as_the_line_says(pasted: Served) -> None:
    model = pasted.client.models.list().data[0]
    assert model.id == str(TINY), "vLLM names a model as the command line does"
    assert model.max_model_len == 2000  # ty: ignore[unresolved-attribute] - vLLM's field
    answers = [
        pasted.client.chat.completions.create(
            model=str(TINY), messages=[{"role": "user", "content": "What is the capital of France?"}]
        )
        for _ in range(2)
    ]
    said = [answer.choices[0].message.content for answer in answers]
    assert said == ["The capital of France is Paris."] * 2, "greedy by default, and without reasoning"
    assert answers[0].usage is not None and answers[0].usage.prompt_tokens_details is not None
    assert pasted.metric("spec_decode_num_drafts_total") > 0
    assert pasted.metric("spec_decode_num_draft_tokens_total") <= 3 * pasted.metric(
        "spec_decode_num_drafts_total"
    )


def test_it_says_what_differs(pasted: Served) -> None:
    assert "--host is 127.0.0.1 (vLLM: every interface)" in pasted.log()
    assert "acceptance" not in pasted.log(), "--disable-log-stats"
