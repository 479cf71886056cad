"""From a request body to engine requests: what prompt, how many tokens, which sampling, n children with their seeds.

Everything a user can get wrong is refused here, before the engine sees it (A3, F14). Knows no HTTP and no answers.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from flashstep.chat.conversation import Conversation, Talk
from flashstep.chat.encode import ChatError, ChatPrompt
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.generation import EFFORT_TIERS
from flashstep.request import Constraint, Request, SamplingParams, problems
from flashstep.server import constraints, tools, turns
from flashstep.server.errors import ApiError, quoted, refuse
from flashstep.server.frontend import Frontend
from flashstep.server.gate import ID_RULE, is_id
from flashstep.server.metrics.outcome import child_id
from flashstep.server.openai import ChatBody, CompletionBody, SamplingBody, Thinking, TokenizeBody

MAX_CHOICES = 128
MAX_ANSWERS = 4096  # of all prompts of a request together
MAX_STOP_STRINGS = 16
MAX_WORDS = 1024  # bad words, and ids that stop
MAX_WORD_CHARS = 1000
MAX_SALT_CHARS = 128
SEED_STEP = (
    0x9E3779B97F4A7C15  # golden ratio: the children of one seed, and of neighbouring seeds, are far apart
)


def conversation(body: ChatBody | TokenizeBody) -> Conversation:
    """The conversation that ``body`` describes."""
    tools.offer(body.tools, body.tool_choice)
    form = constraints.rendered_format(body.response_format) if isinstance(body, ChatBody) else None
    return Conversation(
        messages=_messages(body),
        tools=body.tools or (),
        tool_choice=body.tool_choice or "auto",
        response_format=form,
        thinking=_thinking(body),
        effort=_effort(body),
    )


def chat_prompt(front: Frontend, talk: Talk) -> ChatPrompt:
    """Where a call is required the prompt begins it, unless the model thinks before: the recipe has no prompt for that.

    ``strict`` is kept from the recipe, which would refuse optional parameters, and drop definitions from the prompt.
    """
    talk = msgspec.structs.replace(talk, tools=[_without_strict(tool) for tool in talk.tools])
    choice = talk.tool_choice
    kind = choice if isinstance(choice, str) else choice.get("type")
    try:
        if kind not in ("auto", "none"):
            free = front.encoder.encode(msgspec.structs.replace(talk, tool_choice="auto"))
            if free.thinking:
                return free
        return front.encoder.encode(talk)
    except ChatError as error:
        raise ApiError(str(error), param=error.param) from error


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """``tool`` in any API's form."""
    made = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(made.get("function"), dict):
        made["function"] = {key: value for key, value in made["function"].items() if key != "strict"}
    return made


def _messages(body: ChatBody | TokenizeBody) -> list[dict[str, Any]]:
    refuse(turns.chat_problems(body.messages or ()))
    messages = [_without_developer(message) for message in body.messages or []]
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            raise ApiError(
                "add_generation_prompt is false; without a turn to answer in there is nothing to say, unless"
                " continue_final_message is true",
                param="add_generation_prompt",
            )
        return messages
    if body.add_generation_prompt:
        raise ApiError(
            "add_generation_prompt and continue_final_message are both true; the answer either begins a turn or"
            " continues the last one",
            param="continue_final_message",
        )
    if not messages or messages[-1].get("role") != "assistant":
        raise ApiError(
            "continue_final_message is true; the last message must be the assistant's",
            param="continue_final_message",
        )
    return [*messages[:-1], messages[-1] | {"prefix": True}]


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name for the system role, which the model has no turn of."""
    return message | {"role": "system"} if message.get("role") == "developer" else message


def _thinking(body: ChatBody | TokenizeBody) -> bool | None:
    """On or off, in whichever spellings; they must agree. Effort "none" is one of them."""
    options = body.chat_template_kwargs
    said: dict[str, bool | Thinking | None] = {
        "thinking": body.thinking,
        "enable_thinking": body.enable_thinking,
        "chat_template_kwargs.thinking": options.thinking,
        "chat_template_kwargs.enable_thinking": options.enable_thinking,
        "reasoning_effort": False if "none" in (body.reasoning_effort, options.reasoning_effort) else None,
    }
    given = {
        name: one.type == "enabled" if isinstance(one, Thinking) else one
        for name, one in said.items()
        if one is not None
    }
    if len(set(given.values())) > 1:
        named = " and ".join(given)
        last = list(given)[-1]
        raise ApiError(f"thinking is switched on and off at once, by {named}", param=last.split(".")[0])
    return next(iter(given.values()), None)


def _effort(body: ChatBody | TokenizeBody) -> str | int | None:
    """A tier's name, or a number 1..100 (a fraction below 1 is a share of 100, as SGLang has it)."""
    inner, outer = body.chat_template_kwargs.reasoning_effort, body.reasoning_effort
    if inner is not None and outer is not None and inner != outer:
        raise ApiError(
            f"reasoning_effort is given twice: {quoted(outer)} and {quoted(inner)}", param="reasoning_effort"
        )
    effort = outer if outer is not None else inner
    if isinstance(effort, str) and effort.strip().isdecimal():
        raise ApiError(
            f"reasoning_effort is the string {quoted(effort)}; a number is sent without quotes",
            param="reasoning_effort",
        )
    allowed = f"{', '.join(EFFORT_TIERS)}, a whole number in 1..100, or a fraction in 0.01..0.99"
    if isinstance(effort, str) and effort not in EFFORT_TIERS:
        raise ApiError(
            f"reasoning_effort is {quoted(effort)}; it must be {allowed}", param="reasoning_effort"
        )
    if effort is None or isinstance(effort, str):
        return effort
    number = round(effort * 100) if isinstance(effort, float) and 0 < effort < 1 else effort
    if not 1 <= number <= 100 or number != int(number):
        raise ApiError(f"reasoning_effort is {effort}; it must be {allowed}", param="reasoning_effort")
    return int(number)


def sampling(
    front: Frontend,
    body: SamplingBody,
    *,
    lengths: Sequence[int],
    prompt_param: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None = None,
) -> list[SamplingParams]:
    """The checked parameters of each of a body's prompts, which have ``lengths`` tokens.

    ``max_tokens`` None is the rest of the context, which alone differs from prompt to prompt.
    """
    limit, longest = front.ready.max_model_len, max(lengths)
    if not all(lengths):
        raise ApiError(f"{prompt_param} is empty; a prompt needs at least one token", param=prompt_param)
    params = SamplingParams(
        max_tokens=max(limit - longest, 1) if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        bad_words=_bad_words(front.tokenizer, body.bad_words),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
    )
    wrong = _room_problems(front, longest, max_tokens, prompt_param=prompt_param)
    sentences = problems(params, front.ready.vocab_size)
    told = (ApiError(one, param=one.split()[0]) for one in sentences)
    if prompt_logprobs is not None and "filled cache" in front.ready.falsifies:
        wrong.append(
            ApiError(
                "log-probabilities of a prompt need its rows, and this server computes none (--fill-cache); ask for those of the "
                "answer only",
                param="echo" if getattr(body, "prompt_logprobs", None) is None else "prompt_logprobs",
            )
        )
    refuse(chain(wrong, told, _priority_problems(front, body.priority)))
    if max_tokens is not None:
        return [params] * len(lengths)
    return [msgspec.structs.replace(params, max_tokens=limit - length) for length in lengths]


def _priority_problems(front: Frontend, priority: int) -> Iterator[ApiError]:
    if priority and front.ready.scheduling_policy != "priority":
        yield ApiError(
            f"priority is {priority}, and requests are served as they come here (--scheduling-policy "
            f"{front.ready.scheduling_policy}); leave it out, or set it to 0",
            param="priority",
        )


def _room_problems(
    front: Frontend, prompt_tokens: int, max_tokens: int | None, *, prompt_param: str
) -> list[ApiError]:
    """What does not fit into the context, in the words by which clients know it (F14)."""
    limit = front.ready.max_model_len
    room = limit - prompt_tokens
    overflow = f"This model's maximum context length is {limit} tokens. However, "
    if room < 1:
        return [
            ApiError(
                f"{overflow}your prompt has {prompt_tokens} tokens, which leaves no room for an answer. Please shorten it.",
                param=prompt_param,
            )
        ]
    if max_tokens is not None and max_tokens > room:
        return [
            ApiError(
                f"{overflow}you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in"
                f" the answer). Please shorten the prompt or lower max_tokens to {room} or less.",
                param="max_tokens",
            )
        ]
    return []


def check_common(body: SamplingBody) -> tuple[str, ...]:
    """The rules that need no prompt. Gives the stop strings."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    refuse(chain(_number_problems(body), _text_problems(body, stop), _stream_problems(body)))
    return stop


def _number_problems(body: SamplingBody) -> Iterator[ApiError]:
    if not 1 <= body.n <= MAX_CHOICES:
        yield ApiError(f"n is {body.n}; it must lie in 1..{MAX_CHOICES}", param="n")
    if body.best_of is not None and body.best_of != body.n:
        yield ApiError(
            f"best_of is {body.best_of}; every choice that is made is given, so it must be n ({body.n}), or absent",
            param="best_of",
        )
    if not -(1 << 63) <= body.priority < 1 << 63:
        yield ApiError("priority must be a signed 64-bit integer", param="priority")


def _text_problems(body: SamplingBody, stop: tuple[str, ...]) -> Iterator[ApiError]:
    if len(stop) > MAX_STOP_STRINGS or not all(stop):
        yield ApiError(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
    for name in ("bad_words", "stop_token_ids"):
        if (count := len(getattr(body, name))) > MAX_WORDS:
            yield ApiError(f"{name} has {count} entries; at most {MAX_WORDS} are taken", param=name)
    if (longest := max(map(len, body.bad_words), default=0)) > MAX_WORD_CHARS:
        yield ApiError(
            f"bad_words holds a word of {longest} characters; at most {MAX_WORD_CHARS} are taken",
            param="bad_words",
        )
    if len(body.cache_salt) > MAX_SALT_CHARS:
        yield ApiError(f"cache_salt is longer than {MAX_SALT_CHARS} characters", param="cache_salt")
    if body.request_id is not None and not is_id(body.request_id):
        yield ApiError(f"request_id {ID_RULE}", param="request_id")


def _stream_problems(body: SamplingBody) -> Iterator[ApiError]:
    if body.stream_options is not None and not body.stream:
        yield ApiError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        yield ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs")


def children(body: SamplingBody, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
    """The n requests of one prompt. A given seed gives each child its own, the first the seed itself."""
    request = uuid.uuid4().hex
    arrival = time.monotonic()
    made = []
    for child in range(body.n):
        own = params
        if params.seed is not None and child:
            own = msgspec.structs.replace(params, seed=(params.seed + child * SEED_STEP) % (1 << 63))
        made.append(
            Request(
                id=child_id(request, child),
                prompt=prompt,
                params=own,
                arrival=arrival,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
        )
    return made


def prompts(front: Frontend, body: CompletionBody) -> list[tuple[str | None, tuple[int, ...]]]:
    """The prompts of a completion, each with its text (of ids only what is echoed), and its ids."""
    given = body.prompt
    if isinstance(given, str):
        items: list[str | list[int]] = [given]
    elif not given:
        raise ApiError("prompt is an empty list", param="prompt")
    else:
        ids = [item for item in given if isinstance(item, int)]
        if ids and len(ids) < len(given):
            raise ApiError("prompt mixes token ids with texts or lists", param="prompt")
        items = [ids] if ids else [item for item in given if not isinstance(item, int)]
    if len(items) * body.n > MAX_ANSWERS:
        raise ApiError(
            f"prompt holds {len(items)} prompts, with {body.n} choices each; one request takes {MAX_ANSWERS} choices in all",
            param="prompt",
        )
    return [_prompt(front, body, item) for item in items]


def _prompt(
    front: Frontend, body: CompletionBody, item: str | list[int]
) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(item, str):
        return item, tuple(front.tokenizer.encode(item, add_special_tokens=body.add_special_tokens))
    size = front.ready.vocab_size
    for token in item:
        if not 0 <= token < size:
            raise ApiError(f"prompt holds token {token}; token ids lie in 0..{size - 1}", param="prompt")
    return front.tokenizer.decode(item) if body.echo else None, tuple(item)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
            raise ApiError(f"logit_bias: {quoted(key)} is not a token id", param="logit_bias")
        bias[int(key)] = value
    return bias


def _bad_words(tokenizer: TextTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and as it follows a space, where that is as many tokens (as vLLM)."""
    made = []
    for word in (word.lstrip() for word in words):
        start = tokenizer.encode(word, add_special_tokens=False)
        if not start:
            raise ApiError("bad_words holds an empty word", param="bad_words")
        spaced = tokenizer.encode(" " + word, add_special_tokens=False)
        made.append(tuple(start))
        if spaced[0] != start[0] and len(spaced) == len(start):
            made.append(tuple(spaced))
    return tuple(made)
