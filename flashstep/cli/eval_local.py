"""Questions to an engine in this process: the same prompts, seeds and reading of answers as over HTTP.

Takes a loaded ``LocalModel`` and questions; hands over ``Reply``s as requests end. All are queued at once, and the engine takes
as many as it has room for. Knows no right answers.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from flashstep.bench.quality import prompts
from flashstep.bench.quality.answers import Reply
from flashstep.bench.quality.prompts import Asked, Plan
from flashstep.bench.quality.questions import Question
from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.parse import ChatParser, Delta, TextParser
from flashstep.cli.local import LocalModel
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Request, SamplingParams

Take = Callable[[Question, Reply], None]


class _Open(NamedTuple):
    """A request that runs, and what came of it so far."""

    question: Question
    prompt_tokens: int
    parser: ChatParser | TextParser
    said: list[Delta]


def ask(
    local: LocalModel, asked: Asked, plan: Plan, questions: Sequence[Question], *, run: int, take: Take
) -> None:
    """Ask ``questions`` and hand over each reply when it is there; one that does not fit is an error of its own."""
    encoder = ChatEncoder(local.tokenizer)
    running: dict[str, _Open] = {}
    for question in questions:
        ids, parser = _prompt(local, encoder, asked, plan, question)
        try:
            room = local.room(ids)
        except ValueError as error:
            take(question, Reply(error=str(error), prompt_tokens=len(ids)))
            continue
        params = SamplingParams(
            max_tokens=min(plan.max_tokens, room),
            temperature=plan.temperature,
            top_p=plan.top_p,
            seed=prompts.request_seed(plan, run, question.id),
        )
        name = f"{run}-{question.id}"
        local.engine.add(Request(id=name, prompt=ids, params=params))
        running[name] = _Open(question, len(ids), parser, [])
    try:
        with closing(local.engine.steps()) as steps:
            for outputs in steps:
                for output in outputs:
                    _advance(local, running, output, take)
    finally:
        local.engine.abort(list(running))


def _advance(local: LocalModel, running: dict[str, _Open], output: RequestOutput, take: Take) -> None:
    """Read what a step brought to one request, and take its reply where that was the end."""
    one = running.get(output.id)
    if one is None:
        return  # a stop string has ended it already
    one.said.append(one.parser.push(output.tokens))
    stopped = one.parser.stopped is not None
    if output.finish_reason is None and not stopped:
        return
    last, reason = one.parser.finish(output.finish_reason or "stop")
    one.said.append(last)
    del running[output.id]
    if output.finish_reason is None:
        local.engine.abort([output.id])
    take(one.question, _reply(one, reason))


def _reply(one: _Open, reason: str) -> Reply:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in one.said:
        for call in delta.tool_calls:
            names.setdefault(call.index, call.name or "")
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    return Reply(
        text="".join(delta.content for delta in one.said),
        reasoning="".join(delta.reasoning for delta in one.said),
        calls=tuple(_call(names[index], arguments[index]) for index in sorted(names)),
        finish_reason=reason,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.parser.num_tokens,
        error="the engine failed at this request" if reason in ("error", "abort") else "",
    )


def _call(name: str, arguments: str) -> str:
    """As JSON; arguments that are none (the answer was cut) stay as they were written."""
    try:
        return json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
    except json.JSONDecodeError:
        return name + arguments


def _prompt(
    local: LocalModel, encoder: ChatEncoder, asked: Asked, plan: Plan, question: Question
) -> tuple[tuple[int, ...], ChatParser | TextParser]:
    if plan.api == "completions":
        ids = tuple(local.tokenizer.encode(prompts.text(question, asked.examples)))
        return ids, TextParser(local.tokenizer.detokenizer(), stop=prompts.STOP)
    conversation = Conversation(
        messages=prompts.messages(question, asked.examples), tools=question.tools, thinking=plan.thinking
    )
    prompt = encoder.encode(conversation)
    return prompt.ids, prompt.parser()
