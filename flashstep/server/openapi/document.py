"""The OpenAPI 3.1 document at /openapi.json, made of the routes, their table (``operations``) and the structs of both directions.

Bodies say what ``openai.decode`` does: null means absent, an unknown field is refused, and an option that asks for nothing may be
there. Ranges stand beside types where the server checks them (``fields``). Knows no engine, only its vocabulary.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import flashstep
from flashstep.config.server import ServerOptions
from flashstep.server import openai
from flashstep.server.keys import OPEN_PATHS
from flashstep.server.openapi.fields import REFERRED, known, rules_of
from flashstep.server.openapi.operations import ERRORS, OPERATIONS, Operation, error_body
from flashstep.server.sites import READING

REFERENCE = "#/components/schemas/"
NULL = {"type": "null"}
KEYWORDS = {  # a keyword of RANGES: the JSON types that it speaks of
    "minimum": {"integer", "number"},
    "maximum": {"integer", "number"},
    "exclusiveMinimum": {"integer", "number"},
    "minLength": {"string"},
    "maxLength": {"string"},
    "pattern": {"string"},
    "enum": {"string"},
    "minItems": {"array"},
    "maxItems": {"array"},
    "items": {"array"},
    "propertyNames": {"object"},
    "additionalProperties": {"object"},
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

Schema = dict[str, Any]
Kind = type[msgspec.Struct]


async def openapi(request: Request) -> Response:
    """This document, made once."""
    return Response(request.app.state.openapi, media_type="application/json")


def document(routes: Iterable[BaseRoute], options: ServerOptions, *, vocab_size: int) -> dict[str, Any]:
    """What a server with ``routes`` and ``options`` takes and gives. A route that the table lacks is not in it."""
    keyed = bool(options.api_key or options.api_key_file)
    described = [
        (route, method, operation)
        for route in routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
        if (operation := OPERATIONS.get((method, path_of(route)))) is not None
    ]
    components, named = _components({kind for _, _, operation in described for kind in operation.kinds()})
    for name, schema in components.items():
        _apply_rules(name, schema, lambda rules: known(rules, vocab_size=vocab_size, named=named))
    for kind in {operation.body for _, _, operation in described if operation.body is not None}:
        _apply_decoding(components[kind.__name__], set(kind.__struct_fields__))
    paths: dict[str, dict[str, Any]] = {}
    for route, method, operation in described:
        told = _operation(route, operation, named)
        if method not in READING:
            told["responses"] |= _errors(route.path, (403,), named)
        if keyed and route.path not in OPEN_PATHS:
            told["security"] = [{name: []} for name in KEYS]
            told["responses"] |= _errors(route.path, (401,), named)
        paths.setdefault(path_of(route), {})[method.lower()] = told
    secured = {"securitySchemes": KEYS} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flashstep",
            "version": flashstep.__version__,
            "description": "OpenAI's and Anthropic's APIs over one model, with vLLM's extensions.",
        },
        "paths": paths,
        "components": {"schemas": components, **secured},
    }


def encoded(made: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(made)


def path_of(route: Route) -> str:
    """The path as OpenAPI writes it: parameters without Starlette's converters."""
    return route.path.replace(":path}", "}")


def _operation(route: Route, operation: Operation, named: Mapping[Kind, Schema]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": _identifier(operation),
        "summary": operation.says,
        "responses": {"200": _success(operation, named)} | _errors(route.path, operation.errors, named),
    }
    if route.param_convertors:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if operation.body is not None:
        told["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": named[operation.body]}},
        }
    return told


def _identifier(operation: Operation) -> str:
    """A name that generated clients can give to a function."""
    words = re.findall(r"\w+", operation.path) or ["root"]
    return "_".join([operation.method.lower(), *words])


def _success(operation: Operation, named: Mapping[Kind, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": named[operation.answer]}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _event(operation, named)}
    content |= {media: {"schema": {"type": "string"}} for media in operation.media}
    told: dict[str, Any] = {"description": operation.gives}
    return told | {"content": content} if content else told


def _event(operation: Operation, named: Mapping[Kind, Schema]) -> Schema:
    """One event of a stream (before OpenAPI 3.2 a stream's schema is that of each event)."""
    kinds = [kind for kind in (operation.events, error_body(operation.path)) if kind is not None]
    data = [{"contentMediaType": "application/json", "contentSchema": named[kind]} for kind in kinds]
    last = [] if operation.last_event is None else [{"const": operation.last_event}]
    return {
        "type": "object",
        "description": "Of each server-sent event.",
        "properties": {"data": {"type": "string", "anyOf": [*data, *last]}, "event": {"type": "string"}},
        "required": ["data"],
    }


def _errors(path: str, statuses: Iterable[int], named: Mapping[Kind, Schema]) -> dict[str, Any]:
    schema = named[error_body(path)]
    return {
        str(status): {"description": ERRORS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _components(kinds: set[Kind]) -> tuple[dict[str, Schema], dict[Kind, Schema]]:
    """The schemas of ``kinds``, of what they consist of, and of what rules refer to; and how each of ``kinds`` is referred to."""
    ordered = sorted(kinds | set(REFERRED), key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template=REFERENCE + "{name}")
    return dict(components), dict(zip(ordered, references, strict=True))


def _apply_rules(name: str, schema: Schema, known: Callable[[Schema], Schema]) -> None:
    """What ``fields`` says of the properties of the struct ``name``."""
    for field, told in schema.get("properties", {}).items():
        replaced, ranges = rules_of(name, field)
        schema["properties"][field] = known(_ranged(told, ranges) if replaced is None else replaced)


def _apply_decoding(schema: Schema, names: set[str]) -> None:
    """What ``openai.decode`` takes beyond the body's own fields."""
    required, properties = schema.get("required", []), schema["properties"]
    for name in names - set(required):
        properties[name] = _or_null(properties[name])
    for name in sorted(openai.METADATA - names):
        properties[name] = {"description": "Taken; it changes no answer."}
    for name in sorted(openai.OFF.keys() - names):
        properties[name] = {
            "enum": [openai.OFF[name], None],
            "description": "Only the value that asks for nothing.",
        }
    schema["additionalProperties"] = NULL | {"description": "Any other field is refused, unless it is null."}


def _ranged(schema: Schema, rules: Schema) -> Schema:
    """``schema``, each alternative of it with the ``rules`` that speak of its type."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_ranged(one, rules) for one in schema["anyOf"]]}
    kind = schema.get("type")
    return schema | {word: rule for word, rule in rules.items() if kind in KEYWORDS[word]}


def _or_null(schema: Schema) -> Schema:
    if not schema.keys() - {"description"} or NULL in schema.get("anyOf", ()):
        return schema
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], NULL]}
    inner = {word: rule for word, rule in schema.items() if word not in ("default", "description")}
    return {word: schema[word] for word in ("default", "description") if word in schema} | {
        "anyOf": [inner, NULL]
    }
