"""A ``serve`` line in vLLM's flags, as flashstep's: what is ours stays, other names and values become ours, the rest is refused.

``translate`` gives the arguments and, in sentences, all that has no counterpart here. Which flags are ours it takes from the
options themselves, so that a new one works at once. Knows no parser of ours and starts nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, get_args

import msgspec

from flashstep.config.engine_options import EngineOptions
from flashstep.config.errors import ConfigError
from flashstep.config.objects import read_object
from flashstep.config.server import ServerOptions, check_serving
from flashstep.config.vllm.flags import OFF, ON, Flag, Shape, Standing
from flashstep.config.vllm.reading import SECRET, Given, key_value, merge, number, read
from flashstep.config.vllm.table import TABLE

S = TypeVar("S", bound=msgspec.Struct)

OBJECTS = (
    "speculative-config",
    "engram-config",
    "override-generation-config",
    "default-chat-template-kwargs",
)
"""Flags of ours that hold a JSON object."""
SIZED = (
    "max-model-len",
    "max-num-batched-tokens",
    "kv-cache-memory-bytes",
    "max-num-queued-tokens",
)
"""Flags of ours whose number may be written 128k or 1M, as in vLLM."""
JSON_LISTS = ("allowed-origins", "allowed-methods", "allowed-headers")
"""Flags of ours that vLLM writes as one JSON list."""


@dataclass(frozen=True)
class Renamed:
    """One of vLLM's flags that is another of ours: which, and what its values become (none named: they stay)."""

    ours: str
    values: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    """of the JSON object that ``ours`` holds"""
    shape: Shape = Shape.VALUE


RENAMED = {
    "device-memory-utilization": Renamed("gpu-memory-utilization"),
    "swa-bounded-replay": Renamed("prefix-hit-policy", {ON: "bounded", OFF: "exact"}, shape=Shape.SWITCH),
    "disable-log-stats": Renamed("acceptance-log-s", {ON: "0", OFF: "10"}, shape=Shape.SWITCH),
    "spec-method": Renamed("speculative-config", key="method"),
    "spec-model": Renamed("speculative-config", key="model"),
    "spec-tokens": Renamed("speculative-config", key="num_speculative_tokens"),
}
VALUES = {"load-format": {"safetensors": "auto"}}  # values of vLLM's that have another name here
FREE_LENGTH = (
    "auto",
    "-1",
)  # of --max-model-len: as long as the model and the memory allow, the default here


@dataclass(frozen=True)
class Translation:
    """``arguments`` for our own parser: MODEL, if one was named, and flags. ``names`` are the flags that were given, as ours."""

    model: str | None
    arguments: list[str]
    problems: list[str]
    names: frozenset[str]


def own_shapes() -> dict[str, Shape]:
    """The flags of ``flashstep serve``: the options', and the command's own."""
    shapes = {"revision": Shape.VALUE}
    for options in (EngineOptions, ServerOptions):
        for item in msgspec.structs.fields(options):
            name = item.name.replace("_", "-")
            shapes[name] = Shape.OBJECT if name in OBJECTS else _shape(item.type)
    return shapes


def _shape(kind: Any) -> Shape:
    if kind is bool:
        return Shape.SWITCH
    return Shape.LIST if getattr(kind, "__origin__", None) in (tuple, list) else Shape.VALUE


def translate(arguments: Sequence[str]) -> Translation:
    """What ``arguments``, all that stands behind ``serve``, say in flags of ours."""
    own = own_shapes()
    shapes = (
        {name: flag.shape for name, flag in TABLE.items()}
        | {name: renamed.shape for name, renamed in RENAMED.items()}
        | {"model": Shape.VALUE}
        | own
    )
    line = read(arguments, shapes)
    problems = line.problems
    models = list(dict.fromkeys([*line.positional, *(g.values[0] for g in line.given if g.name == "model")]))
    if len(models) > 1:
        secret = any(given.name in SECRET for given in line.given)
        shown = "one of them may be meant for another flag" if secret else ", ".join(models)
        problems.append(f"MODEL is given {len(models)} times: {shown}")
    foreign = [given for given in line.given if given.name in TABLE and given.name not in own]
    refused, added = _refused(foreign, problems)
    ours = [_ours(given) for given in [*line.given, *added] if given not in foreign and given.name != "model"]
    written = _written(ours, own, problems)
    problems += refused
    problems += _option_problems(written)
    flags = [word for words in written.values() for word in words]
    return Translation(models[0] if models else None, [*models[:1], *flags], problems, frozenset(written))


# ---- flags of ours ----------------------------------------------------------------------------------------------------------


def _ours(given: Given) -> Given:
    """``given`` under our name, with our values."""
    renamed = RENAMED.get(given.name)
    if renamed is not None:
        values = tuple(renamed.values.get(value, value) for value in given.values)
        return Given(renamed.ours, given.spelled, values, (renamed.key,) if renamed.key else ())
    names = VALUES.get(given.name, {})
    values = tuple(names.get(value, value) for value in given.values)
    if given.name in SIZED:
        sizes = [number(value) for value in values]
        values = tuple(
            value if size is None else str(size) for size, value in zip(sizes, values, strict=True)
        )
    return Given(given.name, given.spelled, values, given.path)


def _written(ours: Iterable[Given], own: Mapping[str, Shape], problems: list[str]) -> dict[str, list[str]]:
    """The words for our own parser, by the name of the flag."""
    by_name: dict[str, list[Given]] = {}
    for given in ours:
        by_name.setdefault(given.name, []).append(given)
    written = {}
    for name, all_given in by_name.items():
        values = _one_value(name, all_given, own[name], problems)
        if own[name] is Shape.SWITCH:
            written[name] = [f"--{name}" if values == [ON] else f"--no-{name}"]
        elif not (name == "max-model-len" and values[0] in FREE_LENGTH):
            written[name] = _words(name, values, problems)
    return written


def _words(name: str, values: list[str], problems: list[str]) -> list[str]:
    """A value that begins with a dash is no flag behind "=", where there is room for one."""
    dashed = any(value.startswith("-") for value in values)
    if dashed and len(values) > 1:
        file = "; --api-key-file takes any" if name == "api-key" else ""
        problems.append(f"--{name} has {len(values)} values, of which none may begin with a dash{file}")
    return [f"--{name}={values[0]}"] if dashed else [f"--{name}", *values]


def _one_value(name: str, given: Sequence[Given], shape: Shape, problems: list[str]) -> list[str]:
    """What a flag says that may be there more than once."""
    if shape is Shape.OBJECT:
        if len(given) == 1 and not given[0].path:
            return [given[0].values[0]]  # whoever reads it tells what is wrong with it
        return [json.dumps(_object(given, problems))]
    values = [value for one in given for value in one.values]
    if shape is Shape.LIST and len({one.values for one in given}) > 1:
        said = "" if name in SECRET else f": {' and '.join(' '.join(one.values) for one in given)}"
        problems.append(f"--{name} is given twice{said}; its values stand behind one of them")
    if shape is Shape.LIST:
        return [word for value in values for word in (_listed(value) if name in JSON_LISTS else [value])]
    if len(set(values)) > 1:
        spelled = " and ".join(
            f"{one.spelled} {one.values[0]}" if shape is Shape.VALUE else one.spelled for one in given
        )
        problems.append(f"--{name} is given twice: {spelled}")
    return values[:1]


def _listed(value: str) -> list[str]:
    """The words of a list that is written as JSON, or the one word."""
    try:
        words = json.loads(value) if value.startswith("[") else None
    except (ValueError, RecursionError):
        words = None
    return [str(word) for word in words] if isinstance(words, list) else [value]


def _object(given: Iterable[Given], problems: list[str]) -> dict[str, Any]:
    """The JSON object that several texts and dotted keys make together."""
    whole: dict[str, Any] = {}
    for one in given:
        where = f"--{one.name}"
        if not one.path:
            fields, wrong = read_object(one.values[0], example='{"key": 1}')
            problems += [f"{one.spelled}: {sentence}" for sentence in wrong]
        else:
            *outer, last = one.path
            value = one.values[0].split(",") if last.endswith("+") else key_value(one.values[0])
            fields = {last.removesuffix("+"): value}
            for key in reversed(outer):
                fields = {key: fields}
        problems += merge(whole, fields, where=where)
    return whole


def _option_problems(written: Mapping[str, list[str]]) -> list[str]:
    """What is wrong with the values of flags of ours, so that it is told together with the rest."""
    found: list[str] = []
    try:
        check_serving(_filled(EngineOptions, written, found), _filled(ServerOptions, written, found))
    except ConfigError as error:
        found += error.problems
    return found


def _filled(options: type[S], written: Mapping[str, list[str]], problems: list[str]) -> S:
    """``options`` as they are written, without the values that are of another type."""
    fields: dict[str, Any] = {}
    for item in msgspec.structs.fields(options):
        name = item.name.replace("_", "-")
        if name in written:
            try:
                fields[item.name] = _value(written[name], item.type)
            except msgspec.ValidationError:
                given = " ".join(written[name]).removeprefix(f"--{name}")[1:]
                problems.append(f"--{name} is {given!r}; it must be {_allowed(item.type)}")
    return options(**fields)


def _value(words: list[str], kind: Any) -> Any:
    """What ``words`` (a flag, and its values or one behind "=") say as ``kind``."""
    if kind is bool:
        return not words[0].startswith("--no-")
    values = [words[0].partition("=")[2]] if "=" in words[0] else words[1:]
    return msgspec.convert(values if _shape(kind) is Shape.LIST else values[0], kind, strict=False)


def _allowed(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(one.value) for one in kind)
    kinds = get_args(kind) or (kind,)
    if isinstance(kinds[0], str):
        return ", ".join(kinds)
    return "a whole number" if int in kinds else "a number"


# ---- flags that are not ours ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Refusal:
    shown: str
    why: str


def _refused(foreign: Sequence[Given], problems: list[str]) -> tuple[list[str], list[Given]]:
    """Sentences for what is not taken, one a reason; and flags of ours that say what was meant."""
    refusals: list[_Refusal] = []
    added: list[Given] = []
    for name in dict.fromkeys(given.name for given in foreign):
        flag = TABLE[name]
        given = [one for one in foreign if one.name == name]
        if flag.shape is Shape.OBJECT:
            fields = _object(given, problems)
            refusals += _refused_keys(flag, fields)
            if name == "compilation-config" and fields.get("cudagraph_mode") == "NONE":
                added.append(Given("enforce-eager", "--compilation-config.cudagraph_mode NONE", (ON,)))
        else:
            refusals += [_refusal(flag, one) for one in given if not set(one.values) <= set(flag.taken)]
    shown: dict[str, list[str]] = {}
    for refusal in refusals:
        shown.setdefault(refusal.why, []).append(refusal.shown)
    return [f"{', '.join(dict.fromkeys(flags))}: {why}" for why, flags in shown.items()], added


def _refusal(flag: Flag, given: Given) -> _Refusal:
    if flag.shape is Shape.SWITCH or flag.name in SECRET:
        return _Refusal(given.spelled, why(flag))
    allowed = f" (allowed: {', '.join(flag.taken)})" if flag.taken else ""
    return _Refusal(f"{given.spelled} {' '.join(given.values)}{allowed}", why(flag))


def _refused_keys(flag: Flag, fields: Mapping[str, Any]) -> Iterable[_Refusal]:
    if fields and not flag.keys:
        yield _Refusal(f"--{flag.name}", why(flag))
        return
    for key, value in fields.items():
        known = flag.keys.get(key)
        if known is None:
            yield _Refusal(f"--{flag.name}.{key}", why(flag))
        elif not any(value == taken and type(value) is type(taken) for taken in known.taken):
            allowed = ", ".join(json.dumps(taken) for taken in known.taken)
            yield _Refusal(
                f"--{flag.name}.{key} {json.dumps(value)} (allowed: {allowed})",
                why(flag, reason=known.reason),
            )


def why(flag: Flag, *, reason: str | None = None) -> str:
    """Why a flag is not taken, and what to use."""
    begin = {
        Standing.LATER: "not there yet: ",
        Standing.NEVER: "no counterpart: ",
        Standing.ALWAYS: "",
        Standing.WORKS: "",
    }[flag.standing]
    end = f"; {flag.instead}" if flag.instead else ""
    return f"{begin}{reason or flag.reason}{end}"
