"""What fields of bodies may hold beyond their types, as JSON Schema: ranges, and the forms of messages and tools.

A rule is of a field's name in every body that is answered by sampling, or of (struct, name). Whether the server holds each is a
test (``tests/server/test_openapi.py``). Rules over several fields cannot be said here: they are errors that name the field.
"""

from collections.abc import Mapping
from typing import Any

from flashstep.config.generation import EFFORT_TIERS
from flashstep.request import LOGIT_BIAS_LIMIT, MAX_LOGPROBS, PENALTY_LIMIT
from flashstep.server import turns
from flashstep.server.gate import ID_PATTERN
from flashstep.server.intake import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    MAX_WORD_CHARS,
    MAX_WORDS,
)
from flashstep.server.messages.body import KEEPS_THINKING, ClientTool
from flashstep.server.responses.body import KEEPS_REASONING, ROLES, TEXT_PARTS, FunctionChoice, FunctionTool
from flashstep.server.tools import MAX_NAME_CHARS, TOOL_CHOICES

Rules = dict[str, Any]

SAMPLED = {"ChatBody", "CompletionBody", "ResponsesBody", "MessagesBody"}
# bodies that only count tokens: rules of (struct, name) are those of the body that answers, and none are of sampling
COUNTED = {"TokenizeBody": "ChatBody", "CountBody": "MessagesBody", "InputBody": "ResponsesBody"}
REFERRED = (FunctionTool, FunctionChoice, ClientTool)  # structs that a rule names; no body has them as a type

INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}
VOCABULARY = "the vocabulary's last token"  # stands for its number until a server is known
TOKEN = {"type": "integer", "minimum": 0, "maximum": VOCABULARY}
PENALTY = {"minimum": -PENALTY_LIMIT, "maximum": PENALTY_LIMIT}
LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}

NAME = {"pattern": f"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}$"}  # of a tool

RANGES: dict[str | tuple[str, str], Rules] = {
    "max_tokens": {"minimum": 1},
    ("CompletionBody", "max_tokens"): {"minimum": 0},
    ("FunctionTool", "name"): NAME,
    ("ClientTool", "name"): NAME,
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
    "bad_words": {
        "maxItems": MAX_WORDS,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARS},
    },
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "seed": INT64,
    "stop": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}, "minLength": 1},
    "stop_sequences": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}},
    "stop_token_ids": {"maxItems": MAX_WORDS, "items": TOKEN},
    "prompt_logprobs": LOGPROBS,
    "top_logprobs": LOGPROBS,
    ("CompletionBody", "logprobs"): LOGPROBS,
    "priority": INT64,
    "request_id": {"pattern": f"^{ID_PATTERN}$"},
    "cache_salt": {"maxLength": MAX_SALT_CHARS},
    ("DetokenizeBody", "tokens"): {"items": TOKEN},
    ("ResponsesBody", "truncation"): {"enum": ["disabled"]},
    ("ResponsesBody", "include"): {"items": {"const": KEEPS_REASONING}},
    ("ResponseFormat", "type"): {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
    ("TextFormat", "type"): {"enum": ["text", "json_object", "json_schema"]},
    ("ContextManagement", "edits"): {
        "items": {
            "type": "object",
            "properties": {name: {"const": value} for name, value in KEEPS_THINKING.items()},
            "required": list(KEEPS_THINKING),
            "additionalProperties": False,
        }
    },
}

STRING: Rules = {"type": "string"}
STRING_OR_NULL: Rules = {"type": ["string", "null"]}
BOOLEAN_OR_NULL: Rules = {"type": ["boolean", "null"]}
TYPED_IDLE: dict[str, Rules] = {  # what changes no answer, and has a type nevertheless
    "name": STRING_OR_NULL,
    "signature": STRING_OR_NULL,
    "is_error": BOOLEAN_OR_NULL,
}


def _closed(form: turns.Form, needed: dict[str, Rules], **optional: Rules) -> Rules:
    """An object with the fields of ``form`` and no others, of which it must have those of ``needed``."""
    idle = {name: TYPED_IDLE.get(name, {}) for name in form.idle}
    return {
        "type": "object",
        "properties": idle | needed | optional,
        "required": list(needed),
        "additionalProperties": {"type": "null"},
    }


def _content(part: Rules) -> Rules:
    return {"anyOf": [STRING, {"type": "array", "items": part}]}


CONTENT = _content(_closed(turns.CHAT_PART, {"type": {"const": "text"}, "text": STRING}))
CALL = _closed(
    turns.CHAT_CALL,
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": _closed(
            turns.CHAT_FUNCTION,
            {"name": STRING, "arguments": {"type": "string", "description": "a JSON object, as text"}},
        ),
    },
)
MESSAGE: Rules = {
    "anyOf": [
        _closed(turns.CHAT["user"], {"role": {"enum": ["system", "developer", "user"]}, "content": CONTENT}),
        _closed(turns.CHAT["latest_reminder"], {"role": {"const": "latest_reminder"}, "content": STRING}),
        _closed(
            turns.CHAT["assistant"],
            {"role": {"const": "assistant"}},
            content={"anyOf": [*CONTENT["anyOf"], {"type": "null"}]},
            reasoning=STRING_OR_NULL,
            reasoning_content=STRING_OR_NULL,
            tool_calls={"anyOf": [{"type": "array", "items": CALL, "minItems": 1}, {"type": "null"}]},
            prefix=BOOLEAN_OR_NULL,
        )
        | {"description": "Content, calls, or both."},
        _closed(turns.CHAT["tool"], {"role": {"const": "tool"}, "content": CONTENT, "tool_call_id": STRING})
        | {"description": "The answer to a call of the message before."},
    ]
}
MESSAGES: Rules = {"type": "array", "items": MESSAGE, "minItems": 1}
PARAMETERS: Rules = {
    "type": "object",
    "description": "A JSON schema of an object.",
    "properties": {"type": {"const": "object"}},
    "required": ["type"],
}
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
                    "name": {"type": "string", **NAME},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"anyOf": [PARAMETERS, {"type": "null"}]},
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
        {"enum": list(EFFORT_TIERS)},
        {"type": "integer", "minimum": 1, "maximum": 100},
        {"type": "number", "exclusiveMinimum": 0.005, "exclusiveMaximum": 1},
    ],
}
EFFORT_OR_NULL: Rules = EFFORT | {"anyOf": [*EFFORT["anyOf"], {"type": "null"}]}
TOOL_CHOICE: Rules = {
    "anyOf": [
        {"enum": list(TOOL_CHOICES)},
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


def _typed(kind: str, forms: dict[str, turns.Form], needed: dict[str, Rules], **optional: Rules) -> Rules:
    """An object whose ``type`` is ``kind``, one of ``forms``, with the fields that it needs."""
    return _closed(forms[kind], {"type": {"const": kind}} | needed, **optional)


TEXT_BLOCK = _typed("text", turns.BLOCKS, {"text": STRING})
SYSTEM: Rules = _content(TEXT_BLOCK)


def _turn(role: str, *blocks: Rules) -> Rules:
    content = _content({"anyOf": [TEXT_BLOCK, *blocks]})
    return _closed(turns.TURN, {"role": {"const": role}, "content": content})


TURNS: Rules = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _turn("user", _typed("tool_result", turns.BLOCKS, {"tool_use_id": STRING}, content=SYSTEM)),
            _turn(
                "assistant",
                _typed("thinking", turns.BLOCKS, {"thinking": STRING}),
                _typed("tool_use", turns.BLOCKS, {"id": STRING, "name": STRING, "input": {"type": "object"}}),
            ),
        ]
    },
}
CALL_ID: Rules = {"type": "string", "minLength": 1}
OUTPUTS: Rules = {
    "type": "array",
    "items": _closed(turns.ITEM_PART, {"type": {"const": "input_text"}, "text": STRING}),
}
PARTS: Rules = {
    "type": "array",
    "items": _closed(turns.ITEM_PART, {"type": {"enum": list(TEXT_PARTS)}, "text": STRING}),
}
REASONED: Rules = {
    "type": "array",
    "minItems": 1,
    "items": _closed(turns.REASONING_PART, {"text": STRING}, type={}),
}
ITEM: Rules = {
    "anyOf": [
        _closed(
            turns.ITEMS["message"],
            {"role": {"enum": list(ROLES)}, "content": {"anyOf": [STRING, PARTS]}},
            type={"const": "message"},
        ),
        _typed(
            "function_call",
            turns.ITEMS,
            {"call_id": CALL_ID, "name": STRING, "arguments": STRING},
            namespace=STRING_OR_NULL,
        ),
        _typed(
            "function_call_output",
            turns.ITEMS,
            {"output": {"anyOf": [STRING, OUTPUTS]}},
            call_id={"anyOf": [CALL_ID, {"type": "null"}]},
        ),
        _typed("reasoning", turns.ITEMS, {"content": REASONED}, encrypted_content=STRING_OR_NULL),
        _typed("reasoning", turns.ITEMS, {"encrypted_content": STRING}),
    ]
}
# instead of what the struct's types say
REPLACED: dict[str | tuple[str, str], Rules] = {
    ("ChatBody", "messages"): MESSAGES,
    ("ChatBody", "tools"): TOOLS,
    ("ChatBody", "tool_choice"): TOOL_CHOICE,
    ("MessagesBody", "messages"): TURNS,
    ("MessagesBody", "system"): SYSTEM,
    ("MessagesBody", "tools"): {"type": "array", "items": ClientTool},
    ("ResponsesBody", "input"): {
        "anyOf": [{"type": "string"}, {"type": "array", "items": ITEM, "minItems": 1}]
    },
    ("ResponsesBody", "tools"): {"type": "array", "items": FunctionTool},
    ("FunctionTool", "parameters"): {"anyOf": [PARAMETERS, {"type": "null"}]},
    ("ClientTool", "input_schema"): PARAMETERS,
    ("ResponsesBody", "tool_choice"): {"anyOf": [{"enum": list(TOOL_CHOICES)}, FunctionChoice]},
    ("Reasoning", "effort"): EFFORT_OR_NULL,
    ("OutputConfig", "effort"): EFFORT_OR_NULL,
    ("TemplateOptions", "reasoning_effort"): EFFORT_OR_NULL,
    ("ChatBody", "reasoning_effort"): EFFORT,
    ("StructuredOutputs", "json_object"): {"enum": [True, None]},
    ("CompletionBody", "prompt"): PROMPT,
}


def rules_of(struct: str, field: str) -> tuple[Rules | None, Rules]:
    """What stands instead of a field's type, if anything, and what is added to it."""
    place = (COUNTED.get(struct, struct), field)
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
