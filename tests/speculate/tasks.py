"""Held-out prompts for the embedded model, by task, as engine requests: reasoning, tools, recall, chat, and grammars."""

import random
from collections.abc import Iterator

from flashstep.chat import grammar
from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.cli.model import tiny_model
from flashstep.request import Request, SamplingParams
from train.cases import call_cases, problem_cases, recall_cases
from train.chat import chat
from train.corpus import DEFAULT_FILE, Corpus
from train.dialogue import Dialogue

SHARES = {"problem": 0.35, "call": 0.25, "recall": 0.1, "chat": 0.15, "grammar": 0.15}
RECALL_TOKENS = 600
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}  # fmt: skip


def requests(count: int, *, seed: int, max_tokens: int = 120, **params: object) -> dict[str, list[Request]]:
    """About ``count`` requests, by task; their seeds are consecutive numbers."""
    tokenizer = TextTokenizer.from_file(tiny_model() / "tokenizer.json")
    encoder = ChatEncoder(tokenizer)
    numbers = iter(range(1 << 40))
    found: dict[str, list[Request]] = {}
    for task, share in SHARES.items():
        dialogues = _dialogues(task, max(round(share * count), 1), seed=seed)
        found[task] = [
            _request(encoder, dialogue, task, number=next(numbers), max_tokens=max_tokens, params=params)
            for dialogue in dialogues
        ]
    return found


def _dialogues(task: str, count: int, *, seed: int) -> Iterator[Dialogue]:
    if task == "problem":
        yield from (case.dialogue for case in problem_cases(count, seed=seed))
    elif task == "call":
        yield from (case.dialogue for case in call_cases(count, seed=seed))
    elif task == "recall":
        from tokenizers import Tokenizer

        corpus = Corpus.read(DEFAULT_FILE) if DEFAULT_FILE.exists() else Corpus.builtin()
        tokenizer = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
        yield from (
            c.dialogue for c in recall_cases(count, tokenizer, corpus, length=RECALL_TOKENS, seed=seed)
        )
    elif task == "chat":
        chance = random.Random(f"chat {seed}")
        yield from (chat(chance, Corpus.builtin().glosses) for _ in range(count))
    else:  # problems, to be answered in a form
        yield from (case.dialogue for case in problem_cases(count, seed=seed + 1000))


def _request(
    encoder: ChatEncoder,
    dialogue: Dialogue,
    task: str,
    *,
    number: int,
    max_tokens: int,
    params: dict[str, object],
) -> Request:
    body = dialogue.request()
    thinking = body.get("thinking", {}).get("type")
    prompt = encoder.encode(
        Conversation(
            messages=body["messages"],
            tools=body.get("tools", ()),
            thinking=None if thinking is None else thinking == "enabled",
        )
    )
    constraint = None
    if task == "grammar":
        forms = (
            grammar.json_schema(SCHEMA),
            grammar.regex(r"The answer is [0-9]{1,4} [a-z]{2,9}\."),
            grammar.choice(["yes", "no", "The answer is unknown."]),
        )
        constraint = grammar.constraint(forms[number % len(forms)], after=prompt.reasoning_end)
    return Request(
        id=f"{task}-{number}",
        prompt=prompt.ids,
        params=SamplingParams(max_tokens=max_tokens, seed=number, constraint=constraint, **params),
    )
