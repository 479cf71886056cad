"""From a chat, in whichever API's words it came, to choices that run: what chat completions, responses and messages share.

Takes a ``ChatBody`` (the sampling, the form of the answer, the tools) and the conversation to encode; gives the encoded prompt
and one ``Choice`` for each answer. Everything a user can get wrong is refused before anything is submitted. Knows no answers.
"""

import re

from starlette.types import Receive

from flashstep.chat.conversation import Talk
from flashstep.chat.encode import ChatPrompt
from flashstep.request import Constraint, SamplingParams
from flashstep.server import constraints, intake
from flashstep.server.answering import submit, worked
from flashstep.server.choices import Choice
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.openai import ChatBody


async def encoded(front: Frontend, talk: Talk, *, size: int) -> ChatPrompt:
    """The prompt of a body of ``size`` bytes."""
    return await worked(intake.chat_prompt, front, talk, size=size)


async def start(
    front: Frontend, body: ChatBody, talk: Talk, *, size: int, receive: Receive
) -> tuple[ChatPrompt, list[Choice]]:
    """Encode, check and submit. ``receive`` is the request's, whose body has been read."""
    stop = _checked(body)
    prompt = await encoded(front, talk, size=size)
    constraint = constraints.limited(
        await constraints.constraint(front, body, prompt, receive=receive),
        body.thinking_token_budget,
        after=prompt.reasoning_end,
    )
    params = await worked(_params, front, body, prompt, constraint, size=size)
    streams = submit(front, intake.children(body, prompt.ids, params))
    hides_calls = body.tool_choice == "none"
    choices = [
        Choice(
            source,
            prompt.parser(
                stop=stop,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                max_tool_calls=0 if hides_calls else None if body.parallel_tool_calls else 1,
                skip_special_tokens=body.skip_special_tokens,
            ),
            index=index,
            prompt_tokens=len(prompt.ids),
            keep_stop=body.include_stop_str_in_output,
            metrics=front.metrics,
            hears_out=front.tells_acceptance or body.return_metrics,
        )
        for index, source in enumerate(streams)
    ]
    return prompt, choices


def _checked(body: ChatBody) -> tuple[str, ...]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise ApiError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; they mean the same",
            param="max_completion_tokens",
        )
    budget = body.thinking_token_budget
    if budget is not None and not 0 <= budget < 1 << 63:
        raise ApiError(
            f"thinking_token_budget is {budget}; it must be at least 0 and below 2^63, or absent for no limit",
            param="thinking_token_budget",
        )
    return intake.check_common(body)


def _params(
    front: Frontend, body: ChatBody, prompt: ChatPrompt, constraint: Constraint | None
) -> SamplingParams:
    try:
        (params,) = intake.sampling(
            front,
            body,
            lengths=[len(prompt.ids)],
            prompt_param="messages",
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            constraint=constraint,
        )
        return params
    except ApiError as error:
        sent = {"logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            sent["max_tokens"] = "max_completion_tokens"
        message = re.sub(
            r"\b(logprobs|max_tokens)\b", lambda found: sent.get(found[0], found[0]), error.message
        )
        raise ApiError(message, param=sent.get(error.param or "", error.param)) from error
