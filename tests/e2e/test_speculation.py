"""Speculation as a user of the server meets it: real processes, the openai client, answers and metrics."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Served

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
PROBLEM = "Anna has 12 pens and buys 4 boxes with 6 pens each. How many pens does Anna have now?"
SCHEMA = {
    "type": "object",
    "properties": {"pens": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["pens"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": PROBLEM}], "temperature": 0},
    {"messages": [{"role": "user", "content": PROBLEM}], "temperature": 1, "seed": 5, "n": 3},
    {"messages": [{"role": "user", "content": PROBLEM}], "temperature": 0, "stop": ["answer"]},
    {"messages": [{"role": "user", "content": "What is 37 * 48?"}], "temperature": 0, "tools": [CALCULATOR]},
    {
        "messages": [{"role": "user", "content": f"{PROBLEM} Reply in json."}],
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pens", "schema": SCHEMA, "strict": True}},
    },
    {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 1,
        "seed": 3,
        "frequency_penalty": 1,
        "logprobs": True,
        "top_logprobs": 2,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    served = Served()
    yield served
    served.remove()


@pytest.fixture(scope="module")
def speculating() -> Iterator[Served]:
    served = Served(None, "--speculative-config", "{}", "--per-request-spec-decode-metrics", "summary")
    yield served
    served.remove()


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(sorted(asked.keys() - {"messages"})))
def test_answers_are_those_of_plain_decoding(
    plain: Served, speculating: Served, asked: dict[str, Any]
) -> None:
    """Reasoning, n, stop strings, tools, forms, penalties and log-probabilities; and the answer says what was saved."""
    whole = [
        served.client.chat.completions.create(model=served.model, max_tokens=120, **asked)
        for served in (plain, speculating)
    ]
    choices = [[_comparable(choice) for choice in answer.choices] for answer in whole]
    assert choices[0] == choices[1]
    counts = whole[1].to_dict()["metrics"]["speculative_decoding"]
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"] > 0
    assert counts["num_accepted_draft_tokens"] <= counts["num_draft_tokens"]
    assert "metrics" not in whole[0].to_dict()


def _comparable(choice: Any) -> dict[str, Any]:
    """A choice without the names that every call is given anew."""
    return json.loads(re.sub(r'"id": ?"call_[^"]*"', '"id": ""', choice.to_json()))


def test_streams_and_metrics(speculating: Served) -> None:
    """A stream's last chunk tells the same as the whole; the counters are under vLLM's names, and add up."""
    asked = {"model": speculating.model, "max_tokens": 120, **ASKED[0]}
    whole = speculating.client.chat.completions.create(**asked).to_dict()["metrics"]
    chunks = [chunk.to_dict() for chunk in speculating.client.chat.completions.create(**asked, stream=True)]
    assert [chunk["metrics"] for chunk in chunks if "metrics" in chunk] == [whole]
    assert whole["speculative_decoding"]["mean_acceptance_length"] > 3
    with urllib.request.urlopen(f"{speculating.url}/metrics") as response:
        text = response.read().decode()
    found = {
        name: float(value)
        for name, value in re.findall(r"^(\S+?)(?:\{[^}]*\})? ([0-9.e+]+)$", text, flags=re.MULTILINE)
        if "spec_decode" in name and "per_pos" not in name
    }
    steps, drafts, accepted = (
        found[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < steps <= drafts and 0 < accepted <= drafts
    assert not any("synthetic" in name for name in found)
