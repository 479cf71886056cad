"""From a request body to engine requests: what prompt, how many tokens, which sampling, n children with their seeds.

Everything a user can get wrong is refused here, before the engine sees it (A3, F14). Knows no HTTP and no answers.
"""

import time
import uuid
from typing import Any

import msgspec

from flashstep.chat.encode import ChatError, ChatPrompt, Conversation
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.request import Constraint, Request, SamplingParams, problems
from flashstep.server import constraints
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.openai import ChatBody, CompletionBody, SamplingBody, TokenizeBody

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_SALT_CHARS = 128
SEED_STEP = (
    0x9E3779B97F4A7C15  # golden ratio: the children of one seed, and of neighbouring seeds, are far apart
)


def conversation(body: ChatBody | TokenizeBody) -> Conversation:
    """The conversation that ``body`` describes. What is enforced nowhere yet is refused."""
    choice = body.tool_choice
    if choice is None:
        choice = "auto"
    if isinstance(choice, dict) or choice == "required":
        raise ApiError("tool_choice: only auto and none are supported yet", param="tool_choice")
    if choice not in ("auto", "none"):
        raise ApiError(f"tool_choice is {choice!r}; it must be auto or none", param="tool_choice")
    if body.tools is not None and not body.tools:
        raise ApiError("tools is an empty list; leave it out, or offer a tool", param="tools")
    form = constraints.rendered_format(body.response_format) if isinstance(body, ChatBody) else None
    return Conversation(
        messages=[_without_developer(message) for message in body.messages or []],
        tools=body.tools or (),
        tool_choice=choice,
        response_format=form,
        thinking=_thinking(body),
        effort=_effort(body),
    )


def chat_prompt(front: Frontend, talk: Conversation) -> ChatPrompt:
    try:
        return front.encoder.encode(talk)
    except ChatError as error:
        raise ApiError(str(error), param=error.param) from error


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name for the system role, which the model has no turn of."""
    return message | {"role": "system"} if message.get("role") == "developer" else message


def _thinking(body: ChatBody | TokenizeBody) -> bool | None:
    options = body.chat_template_kwargs
    given = [value for value in (options.thinking, options.enable_thinking) if value is not None]
    if body.thinking is not None:
        given.append(body.thinking.type == "enabled")
    if len(set(given)) > 1:
        raise ApiError("thinking is switched on and off at once", param="chat_template_kwargs")
    return given[0] if given else None


def _effort(body: ChatBody | TokenizeBody) -> str | int | None:
    """A tier's name, or a number 1..100 (a fraction below 1 is a share of 100, as SGLang has it)."""
    inner, outer = body.chat_template_kwargs.reasoning_effort, body.reasoning_effort
    if inner is not None and outer is not None and inner != outer:
        raise ApiError(f"reasoning_effort is given twice: {outer!r} and {inner!r}", param="reasoning_effort")
    effort = outer if outer is not None else inner
    if effort is None or isinstance(effort, str):
        return effort
    number = round(effort * 100) if isinstance(effort, float) and effort < 1 else effort
    if not 1 <= number <= 100 or number != int(number):
        raise ApiError(
            f"reasoning_effort is {effort}; it must be a whole number in 1..100, a fraction in 0.01..0.99, or a name",
            param="reasoning_effort",
        )
    return int(number)


def sampling(
    front: Frontend,
    body: SamplingBody,
    *,
    prompt_tokens: int,
    prompt_param: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """The checked parameters of one prompt. ``max_tokens`` None is the rest of the context."""
    limit = front.ready.max_model_len
    room = limit - prompt_tokens
    overflow = f"This model's maximum context length is {limit} tokens. However, "
    if prompt_tokens == 0:
        raise ApiError(f"{prompt_param} is empty; a prompt needs at least one token", param=prompt_param)
    if room < 1:
        raise ApiError(
            f"{overflow}your prompt has {prompt_tokens} tokens, which leaves no room for an answer. Please shorten it.",
            param=prompt_param,
        )
    if max_tokens is not None and max_tokens > room:
        raise ApiError(
            f"{overflow}you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in"
            f" the answer). Please shorten the prompt or lower max_tokens to {room} or less.",
            param="max_tokens",
        )
    tokenizer = front.tokenizer
    params = SamplingParams(
        max_tokens=room if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        bad_words=tuple(ids for word in body.bad_words for ids in _bad_word(tokenizer, word)),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
    )
    if wrong := problems(params, front.ready.vocab_size):
        raise ApiError("; ".join(wrong), param=wrong[0].split()[0])
    return params


def check_common(body: SamplingBody) -> tuple[str, ...]:
    """The rules that need no prompt. Gives the stop strings."""
    if not 1 <= body.n <= MAX_CHOICES:
        raise ApiError(f"n is {body.n}; it must lie in 1..{MAX_CHOICES}", param="n")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if len(body.cache_salt) > MAX_SALT_CHARS:
        raise ApiError(f"cache_salt is longer than {MAX_SALT_CHARS} characters", param="cache_salt")
    if not -(1 << 63) <= body.priority < 1 << 63:
        raise ApiError("priority must be a signed 64-bit integer", param="priority")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stop) > MAX_STOP_STRINGS or not all(stop):
        raise ApiError(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
    return stop


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
                id=f"{request}-{child}",
                prompt=prompt,
                params=own,
                arrival=arrival,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
        )
    return made


def prompts(front: Frontend, body: CompletionBody) -> list[tuple[str | None, tuple[int, ...]]]:
    """The prompts of a completion, each with its text where the user gave text, and its ids."""
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
    return [_prompt(front, item, add_special_tokens=body.add_special_tokens) for item in items]


def _prompt(
    front: Frontend, item: str | list[int], *, add_special_tokens: bool
) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(item, str):
        return item, tuple(front.tokenizer.encode(item, add_special_tokens=add_special_tokens))
    size = front.ready.vocab_size
    for token in item:
        if not 0 <= token < size:
            raise ApiError(f"prompt holds token {token}; token ids lie in 0..{size - 1}", param="prompt")
    return None, tuple(item)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
            raise ApiError(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    return bias


def _bad_word(tokenizer: TextTokenizer, word: str) -> list[tuple[int, ...]]:
    """A word as it stands at the start of a text and as it follows a space, where that is as many tokens (as vLLM)."""
    bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
    if not bare:
        raise ApiError("bad_words holds an empty word", param="bad_words")
    spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
    both = [bare]
    if spaced[0] != bare[0] and len(spaced) == len(bare):
        both.append(spaced)
    return [tuple(ids) for ids in both]
