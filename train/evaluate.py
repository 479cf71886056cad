"""The three scores of the tiny model, measured through any OpenAI-compatible server, greedily.

``python -m train.evaluate --url http://127.0.0.1:8000``: word problems (final number), recall at 4,096 tokens by
distance (the value), calculator calls (well-formed, and exact arguments), each with a 95% Wilson interval.
"""

import argparse
import concurrent.futures
import json
import math
import re
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from train.cases import Case, call_cases, problem_cases, recall_cases
from train.corpus import DEFAULT_FILE, Corpus

TIMEOUT = 1800
MAX_TOKENS = 160


def wilson(right: int, total: int) -> tuple[float, float]:
    """95% interval of a proportion."""
    if total == 0:
        return 0.0, 1.0
    z, p = 1.96, right / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def complete(url: str, model: str, case: Case) -> dict[str, Any]:
    """The answer message of the server for ``case`` at temperature 0."""
    body = case.dialogue.request() | {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)["choices"][0]["message"]


def served_model(url: str) -> str:
    """The first model that the server names."""
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models", timeout=30) as response:
        return json.load(response)["data"][0]["id"]


def number_right(case: Case, message: dict[str, Any]) -> bool:
    """The last number of the answer is the expected one."""
    numbers = re.findall(r"-?\d+", message.get("content") or "")
    return bool(numbers) and numbers[-1] == case.value


def value_right(case: Case, message: dict[str, Any]) -> bool:
    """The expected value stands in the answer as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(case.value)}(?!\w)", message.get("content") or "") is not None


def call_well_formed(case: Case, message: dict[str, Any]) -> bool:
    """Exactly one call, of the calculator, whose arguments are the JSON object that its schema asks for."""
    calls = message.get("tool_calls") or []
    if len(calls) != 1 or calls[0]["function"]["name"] != case.value:
        return False
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except json.JSONDecodeError:
        return False
    return (
        isinstance(arguments, dict)
        and arguments.keys() == case.dialogue.messages[-1].calls[0].arguments.keys()
    )


def call_exact(case: Case, message: dict[str, Any]) -> bool:
    """A well-formed call with exactly the reference arguments."""
    if not call_well_formed(case, message):
        return False
    return json.loads(message["tool_calls"][0]["function"]["arguments"]) == dict(
        case.dialogue.messages[-1].calls[0].arguments
    )


def measure(
    url: str, cases: Sequence[Case], *, model: str, parallel: int, progress: Progress
) -> list[dict[str, Any]]:
    """The answers to all cases, in order."""
    task = progress.add_task(cases[0].kind if cases else "nothing", total=len(cases))
    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(complete, url, model, case) for case in cases]
        for _ in concurrent.futures.as_completed(futures):
            progress.advance(task)
    return [future.result() for future in futures]


Judge = Callable[[Case, dict[str, Any]], bool]


def report(
    rows: Sequence[tuple[str, Sequence[Case], Sequence[dict[str, Any]], Judge]],
) -> tuple[Table, dict[str, Any]]:
    """A table and the same figures as JSON-able data."""
    table = Table("score", "right", "of", "rate", "95% interval")
    data: dict[str, Any] = {}
    for name, cases, answers, judge in rows:
        right = sum(judge(case, answer) for case, answer in zip(cases, answers, strict=True))
        low, high = wilson(right, len(cases))
        rate = right / max(1, len(cases))
        table.add_row(name, str(right), str(len(cases)), f"{rate:.1%}", f"{low:.1%} to {high:.1%}")
        data[name] = {"right": right, "of": len(cases), "low": low, "high": high}
    return table, data


def main() -> None:
    """Parse the command line, measure, print; ``--json`` also writes the figures and every wrong answer."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluate", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=None, help="served model name; default: the first of /v1/models")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--recall", type=int, default=96)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a recall prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--tokenizer", type=Path, default=Path("flashstep/tiny/tokenizer.json"))
    parser.add_argument(
        "--corpus", type=Path, default=DEFAULT_FILE, help="filler text; a built-in one if the file is absent"
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    corpus = Corpus.read(options.corpus) if options.corpus.exists() else Corpus.builtin()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    model = options.model or served_model(options.url)
    problems = problem_cases(options.problems, seed=options.seed)
    recalls = recall_cases(options.recall, tokenizer, corpus, length=options.length, seed=options.seed)
    calls = call_cases(options.calls, seed=options.seed)
    with Progress() as progress:
        answers = [
            measure(options.url, cases, model=model, parallel=options.parallel, progress=progress)
            for cases in (problems, calls, recalls)
        ]
    rows: list[tuple[str, Sequence[Case], Sequence[dict[str, Any]], Judge]] = [
        ("word problems", problems, answers[0], number_right),
        ("calculator calls, well-formed", calls, answers[1], call_well_formed),
        ("calculator calls, exact arguments", calls, answers[1], call_exact),
        (f"recall at {options.length} tokens", recalls, answers[2], value_right),
    ]
    for start in range(0, options.length, 1024):
        chosen = [i for i, case in enumerate(recalls) if start <= case.distance < start + 1024]
        if chosen:
            name = f"  fact {start} to {start + 1023} tokens back"
            rows.append((name, [recalls[i] for i in chosen], [answers[2][i] for i in chosen], value_right))
    table, data = report(rows)
    Console().print(table)
    if options.json:
        wrong = [
            {
                "kind": case.kind,
                "messages": case.dialogue.request()["messages"][-1:],
                "expected": case.value,
                "got": answer,
            }
            for _, cases, got, judge in rows[:4]
            for case, answer in zip(cases, got, strict=True)
            if not judge(case, answer)
        ]
        options.json.write_text(
            json.dumps({"scores": data, "wrong": wrong}, indent=1, ensure_ascii=False), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
