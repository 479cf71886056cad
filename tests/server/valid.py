"""Valid bodies of every endpoint, and the paths that are read: what ``shots`` makes its requests of.

``KEPT`` in one of them stands for the id of a response that the server keeps.
"""

from typing import Any

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALLED = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
USED = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
]
CLAUDE_TOOL = {"name": "weather", "description": "tells", "input_schema": WEATHER["parameters"]}
KEPT = "resp_kept"
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SHORT = {"max_tokens": 3}

VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, **SHORT}),
    (CHAT, {"messages": HI, **SHORT, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": CALLED, "tools": [TOOL], "tool_choice": "auto", **SHORT, "stream": True}),
    (CHAT, {"messages": HI, **SHORT, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 7, "stop": ["x"]}),
    (CHAT, {"messages": HI, **SHORT, "reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}}),
    (CHAT, {"messages": HI, **SHORT, "reasoning_effort": 40, "thinking": {"type": "enabled"}}),
    (
        CHAT,
        {
            "messages": HI,
            **SHORT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "thinking": {"type": "disabled"},
        },
    ),
    (CHAT, {"messages": HI, **SHORT, "request_id": "mine-1", "stream": True}),
    (CHAT, {"messages": HI, **SHORT, "structured_outputs": {"regex": "[ab]{1,3}"}, "stream": True}),
    (CHAT, {"messages": HI, "max_completion_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    (TEXT, {"prompt": "one two three", **SHORT}),
    (TEXT, {"prompt": [5, 6, 7], **SHORT, "echo": True, "logprobs": 2}),
    (TEXT, {"prompt": ["a", "b c"], **SHORT, "n": 2, "stream": True, "temperature": 0}),
    (TEXT, {"prompt": [[5, 6], [7]], **SHORT, "logit_bias": {"5": -100}, "bad_words": ["a"], "top_k": 4}),
    (TEXT, {"prompt": "x", **SHORT, "structured_outputs": {"choice": ["a", "b"]}, "cache_salt": "s"}),
    (TEXT, {"prompt": "x", **SHORT, "min_tokens": 2, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1}),
    ("/tokenize", {"prompt": "hello world", "return_token_strs": True}),
    ("/tokenize", {"messages": CALLED, "tools": [TOOL]}),
    ("/detokenize", {"tokens": [1, 2, 3, 400]}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 3}),
    (RESPONSES, {"input": HI, "max_output_tokens": 3, "stream": True, "instructions": "be short"}),
    (
        RESPONSES,
        {
            "input": "hi",
            "max_output_tokens": 3,
            "tools": [{"type": "function", **WEATHER}],
            "reasoning": {"effort": "high"},
        },
    ),
    (RESPONSES, {"input": "hi", "max_output_tokens": 40, "background": True}),
    (
        RESPONSES,
        {"input": "and?", "max_output_tokens": 3, "previous_response_id": KEPT, "metadata": {"a": "b"}},
    ),
    (f"{RESPONSES}/input_tokens", {"input": HI, "tools": [{"type": "function", **WEATHER}]}),
    (MESSAGES, {"model": "stub", "messages": HI, **SHORT}),
    (
        MESSAGES,
        {
            "model": "stub",
            "messages": HI,
            **SHORT,
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (MESSAGES, {"model": "stub", "messages": HI, **SHORT, "stream": True, "system": "be short"}),
    (MESSAGES, {"model": "stub", "messages": USED, **SHORT, "tools": [CLAUDE_TOOL]}),
    (f"{MESSAGES}/count_tokens", {"model": "stub", "messages": HI}),
]
READ = (
    "/",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/load",
    "/v1/models",
    "/v1/models/stub",
    "/openapi.json",
    f"{RESPONSES}/resp_x",
)
OF_A_RESPONSE = (("GET", ""), ("GET", "?stream=false"), ("POST", "/cancel"), ("DELETE", ""))
