"""What requests get where they say nothing: sampling defaults of the checkpoint and of the command line, and the chat's switches.

Names and files are vLLM's: ``--generation-config``, ``--override-generation-config``, ``--default-chat-template-kwargs``. Of a
``generation_config.json`` the sampling fields are taken; the rest of it speaks to other programs.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json
from flashstep.config.objects import read_object

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
OVERRIDE = "--override-generation-config"
TEMPLATE = "--default-chat-template-kwargs"

SAMPLING: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, "0 or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: value >= -1 and value == int(value), "a whole number, -1 or 0 for no limit"),
    "min_p": (lambda value: 0 <= value <= 1, "in 0..1"),
    "repetition_penalty": (lambda value: value > 0, "above 0"),
}
NOT_OURS = {
    "max_new_tokens": "requests that name no max_tokens get the rest of the context; say max_tokens there",
    "max_tokens": "requests that name none get the rest of the context; say it there",
}
SWITCHES = ("thinking", "enable_thinking", "reasoning_effort")
EFFORT_TIERS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")  # the recipe's
MOST_EFFORT = 100


def sampling_override(text: str | None) -> dict[str, float]:
    """The defaults that the JSON object ``text`` sets; ``ConfigError`` with everything that is wrong."""
    if text is None:
        return {}
    fields, problems = read_object(text, example='{"temperature": 0.6}')
    for name in fields:
        if name in NOT_OURS:
            problems.append(f"{name} cannot be set for all requests: {NOT_OURS[name]}")
        elif name not in SAMPLING:
            problems.append(f"{name} is not a known field; known are {', '.join(SAMPLING)}")
    known = {name: value for name, value in fields.items() if name in SAMPLING}
    problems += _problems(known)
    if problems:
        raise ConfigError(OVERRIDE, problems)
    return known


def sampling_defaults(source: str, override: str | None, *, checkpoint: Path) -> dict[str, float]:
    """The defaults of a server. ``source`` is "auto" (the checkpoint's file, if it has one), "vllm" (none) or a folder."""
    return _of_file(source, checkpoint) | sampling_override(override)


def _of_file(source: str, checkpoint: Path) -> dict[str, float]:
    if source == NEUTRAL:
        return {}
    file = (checkpoint if source == AUTO else Path(source).expanduser()) / FILE
    if source == AUTO and not file.is_file():
        return {}
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise ConfigError(str(file), ["it is no JSON object"])
    known = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    if problems := _problems(known):
        raise ConfigError(str(file), problems)
    return known


def _problems(fields: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in fields.items():
        is_allowed, allowed = SAMPLING[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_allowed(value):
            found.append(f"{name} is {json.dumps(value)}; it must be {allowed}")
    return found


def template_defaults(text: str | None) -> dict[str, Any]:
    """The switches that the JSON object ``text`` sets for every chat; ``ConfigError`` with everything that is wrong."""
    if text is None:
        return {}
    fields, problems = read_object(text, example='{"thinking": false}')
    for name, value in fields.items():
        if name not in SWITCHES:
            problems.append(f"{name} is not a known field; known are {', '.join(SWITCHES)}")
        elif name != "reasoning_effort":
            if not isinstance(value, bool):
                problems.append(f"{name} is {json.dumps(value)}; it must be true or false")
        elif not _is_effort(value):
            problems.append(
                f"{name} is {json.dumps(value)}; it must be one of {', '.join(EFFORT_TIERS)}, or a"
                f" whole number in 1..{MOST_EFFORT}"
            )
    if len({value for name, value in fields.items() if isinstance(value, bool)}) > 1:
        problems.append("thinking and enable_thinking differ; give one of them")
    if problems:
        raise ConfigError(TEMPLATE, problems)
    return dict(fields)


def _is_effort(value: Any) -> bool:
    if isinstance(value, str):
        return value in EFFORT_TIERS
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_EFFORT
