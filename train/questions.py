"""The held-out questions that ``flashstep eval`` ships: ``python -m train.questions`` writes them as JSON lines.

Drawn from the generators of the training mix, from the side of the split that training never sees (``problems.held_out``), with
a seed of their own; texts of recall are built-in sentences, so that no other licence comes along. Same seed, same files.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashstep.bench.quality.questions import FOLDER
from train.cases import Case, call_cases, problem_cases, recall_cases
from train.corpus import Corpus

SEED = 2026
PROBLEMS, CALLS, RECALLS = 400, 150, 60
RECALL_TOKENS = 600
TOKENIZER = Path(__file__).parents[1] / "flashstep" / "tiny" / "tokenizer.json"


def sets() -> dict[str, list[dict[str, Any]]]:
    """The lines of each file."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    recalls = recall_cases(RECALLS, tokenizer, Corpus.builtin(), length=RECALL_TOKENS, seed=SEED)
    return {
        "word-problems": list(_lines(problem_cases(PROBLEMS, seed=SEED))),
        "recall": list(_lines(recalls)),
        "calls": list(_lines(call_cases(CALLS, seed=SEED))),
    }


def _lines(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """One line a case; of equal questions the first."""
    seen = set()
    for case in cases:
        body = case.dialogue.request()
        *system, user = body["messages"]
        if user["content"] in seen:
            continue
        seen.add(user["content"])
        line = {"question": user["content"], "answer": _answer(case)}
        if system:
            line["system"] = system[0]["content"]
        if "tools" in body:
            line["tools"] = body["tools"]
        yield line


def _answer(case: Case) -> str:
    last = case.dialogue.messages[-1]
    if case.kind == "problem":
        return f"{last.reasoning} {last.content}\n#### {case.value}"
    if case.kind == "call":
        call = last.calls[0]
        return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return case.value


def main() -> None:
    """Write every file."""
    parser = argparse.ArgumentParser(prog="python -m train.questions", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in sets().items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(lines)} questions, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
