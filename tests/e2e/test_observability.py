"""What a real server tells of itself: sums of /metrics against the usage of its answers, and the page before a real model."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.serving import TRAINED, UNTRAINED, Served, await_that, small_model
from tests.server.browser import PATIENCE_MS, chromium

BLOCK = 32
SUMS = (
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "request_prefill_kv_computed_tokens_sum",
    "iteration_tokens_total_sum",
    "request_success_total",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        small_model(tmp_path_factory.mktemp("model") / "small"), "--kv-cache-memory-bytes", str(32 << 20)
    )
    yield served
    served.remove()


def test_sums_are_those_of_the_usage(small: Served) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": [7] * 100, "max_tokens": 5},
        {"prompt": [7] * 100, "max_tokens": 3},  # its beginning is cached
        {"prompt": [[9] * 40, [8] * 10], "max_tokens": 4, "n": 2},
    ]
    usages = [
        (
            small.client.completions.create(model=small.model, extra_body={"ignore_eos": True}, **one).usage,
            one,
        )
        for one in asked
    ]
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage, _ in usages)
    prompt = sum(usage.prompt_tokens * one.get("n", 1) for usage, one in usages)
    generated = sum(usage.completion_tokens for usage, _ in usages)
    await_that(lambda: small.metric("generation_tokens_total") == generated and small.idle)
    told = {name: small.metric(name) for name in SUMS}
    assert cached >= 3 * BLOCK
    assert told["prompt_tokens_total"] == told["request_prompt_tokens_sum"] == prompt
    assert told["request_generation_tokens_sum"] == generated == 5 + 3 + 4 * 4
    # n choices of a prompt find each other's blocks, while usage tells of the first of them
    assert told["prompt_tokens_cached_total"] >= cached
    computed = prompt - told["prompt_tokens_cached_total"]
    assert told["request_prefill_kv_computed_tokens_sum"] == computed
    # every token gets a row but the last of each answer, and a row that was planned before an end was known is thrown away
    finished = told["request_success_total"]
    assert finished == 6
    assert told["iteration_tokens_total_sum"] >= computed + generated - finished
    sources = [
        line for line in small.get("/metrics")[1].splitlines() if "prompt_tokens_by_source_total{" in line
    ]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in sources) == prompt


@pytest.fixture
def tiny() -> Iterator[Served]:
    served = Served()
    yield served
    served.remove()


@pytest.mark.skipif(not TRAINED, reason=UNTRAINED)
def test_the_page_before_a_model_that_speaks(tiny: Served) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(tiny.url)
        page.get_by_label("Message", exact=True).fill("What is 12 + 30?")
        page.get_by_role("button", name="Send").click()
        answer = page.locator('.answer[aria-busy="false"]')
        expect(answer.locator(".content")).to_contain_text("42", timeout=PATIENCE_MS)
        expect(page.locator("#finished")).to_have_text("1")
        expect(page.locator("#hits")).to_have_text("0%")
