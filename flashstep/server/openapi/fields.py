"""What fields of bodies may hold beyond their types, as JSON Schema: ranges, and the forms of messages and tools.

A rule is of a field's name in every body that is answered by sampling, or of (struct, name). Whether the server holds each is a
test (``tests/server/test_openapi.py``). Rules over several fields cannot be said here: they are errors that name the field.
"""

from collections.abc import Mapping
from typing import Any

from flashstep.request import LOGIT_BIAS_LIMIT, MAX_LOGPROBS, PENALTY_LIMIT
from flashstep.server.intake import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    MAX_WORDS,
)
from flashstep.server.messages.body import BLOCKS, KEEPS_THINKING, ClientTool
from flashstep.server.responses.body import KEEPS_REASONING, ROLES, TEXT_PARTS, FunctionChoice, FunctionTool

Rules = dict[str, Any]

SAMPLED = {"ChatBody", "CompletionBody", "ResponsesBody", "MessagesBody"}
REFERRED = (FunctionTool, FunctionChoice, ClientTool)  # structs that a rule names; no body has them as a type

INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}
VOCABULARY = "the vocabulary's last token"  # stands for its number until a server is known
TOKEN = {"type": "integer", "minimum": 0, "maximum": VOCABULARY}
PENALTY = {"minimum": -PENALTY_LIMIT, "maximum": PENALTY_LIMIT}
LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
TIERS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

RANGES: dict[str | tuple[str, str], Rules] = {
    "max_tokens": {"minimum": 1},
    ("CompletionBody", "max_tokens"): {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "thinking_token_budget": {"minimum": 0, "maximum": (1 << 63) - 1},
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": (1 << 63) - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": {"exclusiveMinimum": 0},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -LOGIT_BIAS_LIMIT,
            "maximum": LOGIT_BIAS_LIMIT,
        },
    },
    "bad_words": {"maxItems": MAX_WORDS, "items": {"type": "string", "minLength": 1}},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "seed": INT64,
    "stop": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}, "minLength": 1},
    "stop_sequences": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}},
    "stop_token_ids": {"maxItems": MAX_WORDS, "items": TOKEN},
    "prompt_logprobs": LOGPROBS,
    "top_logprobs": LOGPROBS,
    ("CompletionBody", "logprobs"): LOGPROBS,
    "priority": INT64,
    "request_id": {"minLength": 1, "maxLength": MAX_ID_CHARS},
    "cache_salt": {"maxLength": MAX_SALT_CHARS},
    ("DetokenizeBody", "tokens"): {"items": TOKEN},
    ("ResponsesBody", "truncation"): {"enum": ["disabled"]},
    ("ResponsesBody", "include"): {"items": {"const": KEEPS_REASONING}},
    ("ResponseFormat", "type"): {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
    ("TextFormat", "type"): {"enum": ["text", "json_object", "json_schema"]},
    ("StructuredOutputs", "choice"): {"minItems": 1, "items": {"type": "string"}},
    ("ContextManagement", "edits"): {"items": {"const": KEEPS_THINKING}},
}

TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT: Rules = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
STRING_OR_NULL: Rules = {"type": ["string", "null"]}
CALL: Rules = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "a JSON object, as text"},
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
MESSAGE: Rules = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "latest_reminder"]},
                "content": CONTENT,
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "description": "Content, calls, or both.",
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*CONTENT["anyOf"], {"type": "null"}]},
                "reasoning": STRING_OR_NULL,
                "reasoning_content": STRING_OR_NULL,
                "tool_calls": {"anyOf": [{"type": "array", "items": CALL, "minItems": 1}, {"type": "null"}]},
            },
            "required": ["role"],
        },
        {
            "type": "object",
            "description": "The answer to a call of the message before.",
            "properties": {
                "role": {"const": "tool"},
                "content": CONTENT,
                "tool_call_id": {"type": "string"},
            },
            "required": ["role", "content", "tool_call_id"],
        },
    ]
}
MESSAGES: Rules = {"type": "array", "items": MESSAGE, "minItems": 1}
TOOLS: Rules = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {
                        "type": ["object", "boolean", "null"],
                        "description": "a JSON schema of an object",
                    },
                    "strict": {"type": ["boolean", "null"]},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "required": ["type", "function"],
        "additionalProperties": False,
    },
}
EFFORT: Rules = {
    "description": "A tier, a whole number, or a share of 100.",
    "anyOf": [
        {"enum": list(TIERS)},
        {"type": "integer", "minimum": 1, "maximum": 100},
        {"type": "number", "exclusiveMinimum": 0.005, "exclusiveMaximum": 1},
    ],
}
EFFORT_OR_NULL: Rules = EFFORT | {"anyOf": [*EFFORT["anyOf"], {"type": "null"}]}
TOOL_CHOICE: Rules = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}
PROMPT: Rules = {
    "description": "A text, token ids, or several of either; each becomes a prompt.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_ANSWERS,
            "items": {"type": "string", "minLength": 1},
        },
        {"type": "array", "minItems": 1, "items": TOKEN},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_ANSWERS,
            "items": {"type": "array", "minItems": 1, "items": TOKEN},
        },
    ],
}

BLOCK: Rules = {
    "type": "object",
    "properties": {"type": {"enum": list(BLOCKS)}},
    "required": ["type"],
}
TURNS: Rules = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": BLOCK}]},
        },
        "required": ["role", "content"],
    },
}
SYSTEM: Rules = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
PARTS: Rules = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
ITEM: Rules = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, PARTS]},
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "description": "What an answer held, or the output of a call.",
            "properties": {"type": {"enum": ["reasoning", "function_call", "function_call_output"]}},
            "required": ["type"],
        },
    ]
}
CHOICES = {"enum": ["auto", "none", "required"]}

# instead of what the struct's types say
REPLACED: dict[str | tuple[str, str], Rules] = {
    ("ChatBody", "messages"): MESSAGES,
    ("TokenizeBody", "messages"): MESSAGES,
    ("ChatBody", "tools"): TOOLS,
    ("TokenizeBody", "tools"): TOOLS,
    ("ChatBody", "tool_choice"): TOOL_CHOICE,
    ("TokenizeBody", "tool_choice"): TOOL_CHOICE,
    ("MessagesBody", "messages"): TURNS,
    ("CountBody", "messages"): TURNS,
    ("MessagesBody", "system"): SYSTEM,
    ("CountBody", "system"): SYSTEM,
    ("MessagesBody", "tools"): {"type": "array", "minItems": 1, "items": ClientTool},
    ("CountBody", "tools"): {"type": "array", "minItems": 1, "items": ClientTool},
    ("ResponsesBody", "input"): {
        "anyOf": [{"type": "string"}, {"type": "array", "items": ITEM, "minItems": 1}]
    },
    ("ResponsesBody", "tools"): {"type": "array", "minItems": 1, "items": FunctionTool},
    ("ResponsesBody", "tool_choice"): {"anyOf": [CHOICES, FunctionChoice]},
    ("Reasoning", "effort"): EFFORT_OR_NULL,
    ("OutputConfig", "effort"): EFFORT_OR_NULL,
    ("TemplateOptions", "reasoning_effort"): EFFORT_OR_NULL,
    ("TokenizeBody", "reasoning_effort"): EFFORT,
    ("StructuredOutputs", "json_object"): {"enum": [True, None]},
    "reasoning_effort": EFFORT,
    ("CompletionBody", "prompt"): PROMPT,
}


def rules_of(struct: str, field: str) -> tuple[Rules | None, Rules]:
    """What stands instead of a field's type, if anything, and what is added to it."""
    place = (struct, field)
    if struct not in SAMPLED:
        return REPLACED.get(place), RANGES.get(place, {})
    return REPLACED.get(place) or REPLACED.get(field), RANGES.get(place) or RANGES.get(field, {})


def known(rules: Any, *, vocab_size: int, named: Mapping[Any, Rules]) -> Any:
    """``rules`` of a server with so many tokens, with references to the structs that they name."""
    if isinstance(rules, dict):
        return {word: known(rule, vocab_size=vocab_size, named=named) for word, rule in rules.items()}
    if isinstance(rules, list):
        return [known(rule, vocab_size=vocab_size, named=named) for rule in rules]
    if isinstance(rules, type):
        return named[rules]
    return vocab_size - 1 if rules == VOCABULARY else rules
