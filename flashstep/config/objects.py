"""Options that are one JSON object on the command line: the fields of the text, and in sentences why it may have none."""

import json
from collections.abc import Mapping
from typing import Any


def read_object(text: str, *, example: str) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of the JSON object ``text``; problems where it is none, or names a field twice. ``example`` shows one."""
    twice: list[str] = []

    def gather(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=gather)
    except (
        ValueError,
        RecursionError,
    ) as error:  # also of numbers with thousands of digits, and nesting without end
        return {}, [f"it is not JSON ({error}); expected an object such as {example}"]
    if not isinstance(value, dict):
        return {}, [f"it is {json.dumps(value)}; expected a JSON object such as {example}"]
    return value, [f"it names {name} twice" for name in twice]
