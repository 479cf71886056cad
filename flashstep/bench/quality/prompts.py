"""How questions are asked: the plan of a run, its examples, and the request for one question.

Takes ``Question``s and a ``Plan``; gives messages or a text, a seed for each request, and the body for a server. An engine in
this process is given the same messages and the same seed. Knows no HTTP.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from flashstep.bench.quality.questions import Question, QuestionSet

SEED_BITS = 31  # what any server's integers hold
ASK = "Question: "
ANSWER = "Answer:"
STOP = ("Question:",)  # a completion goes on with a question of its own


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that two arms must have in common. ``thinking`` None is the server's own default."""

    api: Literal["chat", "completions"] = "chat"
    num_fewshot: int = 0
    limit: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    thinking: bool | None = None
    runs: int = 1
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with it, in sentences that name the flags."""
        least = {"num_fewshot": 0, "max_tokens": 1, "runs": 1, "seed": 0, "temperature": 0}
        wrong = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {at_least}"
            for name, at_least in least.items()
            if not getattr(self, name) >= at_least
        ]
        if not 0 < self.top_p <= 1:
            wrong.append(f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        if self.limit is not None and self.limit < 1:
            wrong.append(f"--limit is {self.limit}; it must be at least 1")
        if self.api == "completions" and self.thinking is not None:
            wrong.append("--thinking belongs to a chat; with --api completions the prompt is the text alone")
        return wrong


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The questions of a run, and the examples that stand before each of them."""

    examples: tuple[Question, ...]
    questions: tuple[Question, ...]


def chosen(found: QuestionSet, plan: Plan, examples: QuestionSet | None) -> Asked:
    """Examples are the first of their own set, or of the questions', which are then not asked. ``ValueError`` if too few."""
    source = examples or found
    if plan.num_fewshot > len(source.questions):
        raise ValueError(
            f"--num-fewshot is {plan.num_fewshot}, and {source.name} has {len(source.questions)} questions"
        )
    rest = found.questions if examples is not None else found.questions[plan.num_fewshot :]
    if not rest:
        raise ValueError("every question is an example, and none is left to ask: give --examples, or fewer")
    if any(question.tools for question in rest) and (plan.api == "completions" or plan.num_fewshot):
        raise ValueError(f"{found.name} offers tools: it is asked by --api chat, without examples")
    return Asked(examples=source.questions[: plan.num_fewshot], questions=rest[: plan.limit])


def request_seed(plan: Plan, run: int, id: str) -> int:
    """One for each run and question, whatever else is asked beside it."""
    digest = hashlib.blake2b(f"{plan.seed + run}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def messages(question: Question, examples: Sequence[Question]) -> list[dict[str, Any]]:
    """A chat in which the examples were asked and answered before."""
    turns: list[dict[str, Any]] = []
    if question.system:
        turns.append({"role": "system", "content": question.system})
    for example in examples:
        turns.append({"role": "user", "content": example.question})
        turns.append({"role": "assistant", "content": example.answer})
    turns.append({"role": "user", "content": question.question})
    return turns


def text(question: Question, examples: Sequence[Question]) -> str:
    """A text that the answer continues."""
    parts = [question.system] if question.system else []
    parts += [f"{ASK}{example.question}\n{ANSWER} {example.answer}" for example in examples]
    parts.append(f"{ASK}{question.question}\n{ANSWER}")
    return "\n\n".join(parts)


def body(question: Question, asked: Asked, plan: Plan, *, run: int, model: str) -> dict[str, Any]:
    """The request to a server, streamed, with usage at its end."""
    fields: dict[str, Any] = {
        "model": model,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "max_tokens": plan.max_tokens,
        "seed": request_seed(plan, run, question.id),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.api == "completions":
        return fields | {"prompt": text(question, asked.examples), "stop": list(STOP)}
    fields["messages"] = messages(question, asked.examples)
    if question.tools:
        fields["tools"] = list(question.tools)
    if plan.thinking is not None:
        fields["chat_template_kwargs"] = {"thinking": plan.thinking}
    return fields
