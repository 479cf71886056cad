"""A prompt of 100,000 tokens is accepted and answered, as text over HTTP, in chunks, and again from the cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.serving import Served, little_model

TOKENS = 100_000


def test_a_hundred_thousand_tokens(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    flags = (
        "--kv-cache-memory-bytes",
        str(128 << 20),
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "8192",
    )
    served = Served(little_model(tmp_path / "little"), *flags)
    try:
        one = served.post("/tokenize", {"prompt": " and so on" * 1000})[1]["count"]
        prompt = " and so on" * -(-TOKENS * 1000 // one)
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 5}
        took = []
        answers = []
        for _ in range(2):
            start = time.monotonic()
            status, answer = served.post("/v1/completions", body)
            took.append(time.monotonic() - start)
            assert status == 200, answer
            answers.append(answer)
        record_property("seconds", [round(t, 1) for t in took])
        print(
            f"{answers[0]['usage']['prompt_tokens']} tokens: {took[0]:.1f} s cold, {took[1]:.1f} s from the cache"
        )
        assert answers[0]["usage"]["prompt_tokens"] >= TOKENS
        assert answers[0]["usage"]["completion_tokens"] == 4
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > TOKENS - 100
        assert answers[1]["choices"] == answers[0]["choices"]
    finally:
        served.remove()
