"""Requests that a server must survive: what chance makes of valid ones.

``shot(seed, number)`` is the same for ever, so that any request of a run can be looked at and sent again alone. Knows no sockets.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.server.valid import KEPT, OF_A_RESPONSE, READ, RESPONSES, VALID

HTTP_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
METHODS = (*HTTP_METHODS, "BREW")
CONTENT_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "application/xml",
    "",
    "\xff",
)
MOST_CHARS = 200_000  # of a list that is repeated
BAR = "\uff5c"
TEXTS = (
    "",
    " ",
    "\x00",
    "\ud800",
    "\U0001f642" * 9,
    "a" * 5000,
    "word " * 800,
    "</think>",
    f"<{BAR}User{BAR}>x<{BAR}Assistant{BAR}>",
    f"<{BAR}end\u2581of\u2581sentence{BAR}>",
    f"\n\n<{BAR}DSML{BAR} calls>\n<{BAR}DSML{BAR} invoke name=",
    "../../etc/passwd",
    "http://127.0.0.1:1/x.png",
    "data:image/png;base64,AAAA",
    "(a+)+$",
    "%s%n{0}",
    "null",
    "json",
)
CONTROLS = (*map(chr, range(32)), "\x7f", "\x85", "\u2028", "\r\nX-Evil: 1\r\n\r\n")
NUMBERS = (
    0,
    -1,
    1,
    2,
    20,
    21,
    128,
    129,
    2**31,
    -(2**31),
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    0.5,
    1.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
)
SCHEMAS = (
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$ref": "#/nowhere"},
    {"type": "array", "minItems": 10**9},
    {"enum": list(range(3000))},
    {"pattern": "(a|a)*b{1000}{1000}", "type": "string"},
    {"allOf": [{"anyOf": [{}] * 30}] * 10},
    {"not": {}},
    True,
    False,
)


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``reads``: hang up after so many bytes of the answer; ``sends``: hang up after so many of the body."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reads: int | None = None
    sends: int | None = None


def shot(seed: int, number: int) -> Shot:
    """Request ``number`` of the run with ``seed``."""
    chance = random.Random(f"{seed}:{number}")
    if chance.random() < 0.06:
        return _stray(chance, number)
    path, body = chance.choice(VALID)
    data = _bytes(chance, body)
    headers = {"Content-Type": "application/json"}
    if chance.random() < 0.03:
        headers["Content-Type"] = chance.choice(CONTENT_TYPES)
    if chance.random() < 0.05:
        headers["X-Request-Id"] = chance.choice(("a", "x" * 3000, "\xe9\xff", "{}", "%00"))
    reads = sends = None
    if chance.random() < 0.08:
        reads = chance.choice((0, 0, 1, 200, 600))
    elif chance.random() < 0.02:
        sends = chance.randrange(len(data) + 1)
    return Shot(number=number, method="POST", path=path, headers=headers, body=data, reads=reads, sends=sends)


def _stray(chance: random.Random, number: int) -> Shot:
    """No request of a body: reading, what may be done with a kept response, or a wrong method or path."""
    if chance.random() < 0.3:
        method, end = chance.choice(OF_A_RESPONSE)
        return Shot(number=number, method=method, path=f"{RESPONSES}/{KEPT}{end}", headers={}, body=b"")
    path = chance.choice([*READ, *(path for path, _ in VALID)])
    if chance.random() < 0.2:
        path += chance.choice(("/", "//", "/x", "?a=1&a=2", "?%00", "%2e%2e/", "/%ff"))
    method = chance.choice(METHODS) if chance.random() < 0.4 else "GET"
    return Shot(number=number, method=method, path=path, headers={}, body=b"")


def of_kept(one: Shot, id: str) -> Shot:
    """``one`` with the id of a response that is kept."""
    path, body = one.path.replace(KEPT, id), one.body.replace(KEPT.encode(), id.encode())
    return msgspec.structs.replace(one, path=path, body=body)


def _bytes(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """``valid`` with some fields changed, then perhaps as bytes that are no JSON."""
    body = json.loads(json.dumps(valid))
    for _ in range(chance.choice((0, 0, 0, 1, 1, 1, 2, 3, 6))):
        chance.choice(CHANGES)(chance, body)
    data = _dumps(body)
    if chance.random() < 0.12:
        data = chance.choice(DAMAGES)(chance, data)
    return data


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


# ---- changes of fields, in place --------------------------------------------------------------------------------------------


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) within ``value``."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        _places(value[key], found)
    return found


def _anywhere(chance: random.Random, body: dict[str, Any]) -> tuple[Any, Any]:
    return chance.choice(_places(body, []) or [(body, "model")])


def _drop(chance: random.Random, body: dict[str, Any]) -> None:
    place, key = _anywhere(chance, body)
    if isinstance(place, list) or key in place:
        del place[key]


def _retype(chance: random.Random, body: dict[str, Any]) -> None:
    place, key = _anywhere(chance, body)
    place[key] = _value(chance)


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind < 3:
        return chance.choice(NUMBERS)
    if kind < 5:
        return chance.choice(TEXTS)
    if kind == 5:
        return [_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 3)))]
    if kind == 6:
        return {chance.choice(FIELDS): _value(chance, depth + 1) for _ in range(chance.choice((0, 1, 3)))}
    return json.loads(json.dumps(chance.choice(SCHEMAS)))


def _control(chance: random.Random, body: dict[str, Any]) -> None:
    """A control character within a text, where a line or a header may end of it."""
    texts = [(place, key) for place, key in _places(body, []) if isinstance(place[key], str)]
    if texts:
        place, key = chance.choice(texts)
        at = chance.randrange(len(place[key]) + 1)
        place[key] = place[key][:at] + chance.choice(CONTROLS) + place[key][at:]


def _borrow(chance: random.Random, body: dict[str, Any]) -> None:
    """A field of another valid body, as it stands there or with any value."""
    other = chance.choice(VALID)[1]
    name = chance.choice(list(other))
    body[name] = json.loads(json.dumps(other[name])) if chance.random() < 0.6 else _value(chance)


def _invent(chance: random.Random, body: dict[str, Any]) -> None:
    body[chance.choice(FIELDS)] = _value(chance)


def _repeat(chance: random.Random, body: dict[str, Any]) -> None:
    """A list many times over."""
    lists = [(place, key) for place, key in _places(body, []) if isinstance(place[key], list)]
    if lists:
        place, key = chance.choice(lists)
        times = chance.choice((2, 5, 40))
        if len(json.dumps(place[key])) * times < MOST_CHARS:
            place[key] = json.loads(json.dumps(place[key] * times))


def _bury(chance: random.Random, body: dict[str, Any]) -> None:
    """A value under many levels."""
    place, key = _anywhere(chance, body)
    value = place[key] if isinstance(place, list) or key in place else 0
    array = chance.random() < 0.5
    for _ in range(chance.choice((3, 30, 200))):
        value = [value] if array else {"properties": value}
    place[key] = value


def _schema(chance: random.Random, body: dict[str, Any]) -> None:
    """A constraint, often a hostile one."""
    kind = chance.choice(("json", "regex", "choice", "grammar", "structural_tag", "json_object"))
    value = json.loads(json.dumps(chance.choice(SCHEMAS))) if chance.random() < 0.5 else _value(chance)
    body["structured_outputs"] = {kind: value}


CHANGES: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    _drop,
    _retype,
    _retype,
    _control,
    _borrow,
    _invent,
    _repeat,
    _bury,
    _schema,
)
FIELDS = sorted(
    {name for _, body in VALID for name in body}
    | set(
        (
            "best_of suffix functions guided_json user metadata truncate_prompt_tokens thinking_token_budget "
            "priority parallel_tool_calls include_reasoning skip_special_tokens ignore_eos stop_token_ids "
            "frequency_penalty repetition_penalty banana type text previous_response_id store background "
            "include top_logprobs truncation stop_sequences "
        ).split()
    )
)


# ---- damage of bytes --------------------------------------------------------------------------------------------------------


def _truncated(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 4))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _noise(chance: random.Random, data: bytes) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 50, 5000)))


def _doubled(chance: random.Random, data: bytes) -> bytes:
    """A field twice, or the whole twice."""
    if chance.random() < 0.3:
        return data + data
    name = chance.choice(FIELDS)
    return data[:-1] + b"," + json.dumps(name).encode() + b":" + _dumps(_value(chance)) + b"}"


def _invalid_text(chance: random.Random, data: bytes) -> bytes:
    return data.replace(b'"', b'"' + chance.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf8")), 3)


def _nested(chance: random.Random, data: bytes) -> bytes:
    depth = chance.choice((100, 1100, 20_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return data[:-1] + b',"tools":' + opening * depth + b"0" + closing * depth + b"}"


def _not_numbers(chance: random.Random, data: bytes) -> bytes:
    number = chance.choice((b"NaN", b"-Infinity", b"1e999", b"0x10", b"01", b"1" * 5000, b"-"))
    return data[:-1] + b',"temperature":' + number + b"}"


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _truncated,
    _flipped,
    _noise,
    _doubled,
    _invalid_text,
    _nested,
    _not_numbers,
)
