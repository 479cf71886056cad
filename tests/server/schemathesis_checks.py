"""A check of schemathesis', loaded by its command (``SCHEMATHESIS_HOOKS``): what is refused although the document allows it.

A schema cannot say everything: that two fields exclude each other, that a prompt fits, that a grammar has no fault. ``REASONS``
lists the sentences of such refusals. A refusal of a body that keeps to the document, for any other reason, is a fault.
"""

import json
import re
from typing import Any

import schemathesis

REASONS = [
    # two fields that do not go together, or one that needs another
    r"stream_options needs stream to be true",
    r"prompt_logprobs cannot be streamed",
    r"top_logprobs needs logprobs",
    r"min_tokens is .*; it must not exceed",
    r"thinking is switched on and off at once",
    r"reasoning_effort is given twice",
    r"best_of is .*; every choice",
    r"max_tokens is \d+ and max_completion_tokens",
    r"messages\[\d+\]: reasoning and reasoning_content differ",
    r"add_generation_prompt",
    r"continue_final_message",
    r"give either prompt or messages",
    r"goes with messages, not with prompt",
    r"both ask for a form",
    r"takes exactly one of",
    r"json_schema needs",
    r"as of a tool before it",
    r"one request takes .* choices in all",
    r"must have non-empty content",
    r"background (and|is true)",
    r"the last turn is the assistant's",
    r"the type tool needs a name",
    r"stream_options.(include_usage|continuous_usage_stats)",
    r"a reasoning item needs",
    r"tool_choice (names|asks|needs|is)",
    r"max_tokens is 0",
    r"max_tokens is .*must be at least",
    # what is known only of this model, this server, or this conversation
    r"This model's maximum context length",
    r"cannot be enforced",
    r"logit_bias names token",
    r"logit_bias: .* is not a token id",
    r"the word JSON|contain the word 'json'",
    r"only a background response can be cancelled",
    # how turns follow each other, as the recipe says it
    r"^An assistant message with 'tool_calls' must be followed by tool messages",
    r"^Messages with role 'tool' must be a response to a preceding message",
    r"^Invalid assistant message: content or tool_calls must be set$",
    r"^No tool (output|call) found for ",
    r"messages\[\d+\]\.tool_call_id is .*; the calls of",
    r"^Invalid completion message: prefix set true",
    r"^messages\.\d+(\.\d+)?: ?`tool_use` ids were found without `tool_result` blocks",
    r"^Duplicate (.call_id.|value for .tool_call_id.)",
    r"^unexpected `messages\.\d+\.content\.\d+: tool_use_id` found",
    r"empty; a prompt needs at least one token",
    r"^integer is outside the JSON number range$",
    r"x-request-id must have",
]
KNOWN = re.compile("|".join(REASONS))


@schemathesis.check
def refused_for_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """A request that keeps to the document is answered, or refused by one of the rules that it cannot hold."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = json.loads(response.content)["error"]
    assert KNOWN.search(error["message"]), f"the document allows it, the server says: {error['message']}"
