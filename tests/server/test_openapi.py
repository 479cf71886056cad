"""/openapi.json: every route is in it, it is a valid document, and each range that it tells is the server's."""

import copy
import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from starlette.routing import Route
from tokenizers import Tokenizer

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.server import ServerOptions
from flashstep.engram.token_map import TokenMap
from flashstep.ipc.channel import Addresses
from flashstep.ipc.client import EngineClient
from flashstep.ipc.messages import Ready
from flashstep.server.app import create_app
from flashstep.server.keys import OPEN_PATHS
from flashstep.server.openapi.document import document, path_of
from flashstep.server.openapi.fields import RANGES, REPLACED
from flashstep.server.openapi.operations import OPERATIONS
from tests.server.conftest import MODEL, TOKENIZER, Server

VOCABULARY = 2048
HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {  # of a body, by its struct: what must be there
    "ChatBody": {"messages": HI},
    "CompletionBody": {"prompt": "hi"},
    "ResponsesBody": {"input": "hi"},
    "InputBody": {"input": "hi"},
    "MessagesBody": {"messages": HI, "max_tokens": 1},
    "TokenizeBody": {"messages": HI},
    "DetokenizeBody": {"tokens": [5]},
    "CountBody": {"messages": HI},
}
PATHS = {
    operation.body.__name__: path for (_, path), operation in OPERATIONS.items() if operation.body is not None
}


@pytest.fixture(scope="module")
def told(server: Server) -> dict[str, Any]:
    status, made = server.get("/openapi.json")
    assert status == 200
    return made


def routes() -> list[Route]:
    """Of an application that has every route."""
    addresses = Addresses.fresh()
    client = EngineClient(addresses)
    client.ready = Ready(
        max_model_len=64,
        max_num_seqs=1,
        num_blocks=1,
        block_size=32,
        hit_policy="exact",
        vocab_size=VOCABULARY,
        token_map_fingerprint=TokenMap.build(Tokenizer.from_file(str(TOKENIZER))).fingerprint,
    )
    try:
        encoder = ChatEncoder(TextTokenizer.from_file(TOKENIZER))
        app = create_app(client, encoder, ServerOptions(served_model_name=(MODEL,)))
    finally:
        client.close()
        addresses.remove()
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_described_and_nothing_else(told: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    served = {(method, path_of(route)) for route in routes() for method in route.methods or ()}
    assert {pair for pair in served if pair[0] != "HEAD"} == described == OPERATIONS.keys()


def test_it_is_a_valid_document(told: dict[str, Any]) -> None:
    assert told["openapi"].startswith("3.1")
    schemas = told["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(told)):
        assert name in schemas
    ids = [operation["operationId"] for methods in told["paths"].values() for operation in methods.values()]
    assert all(one.isidentifier() and not one.endswith("_") for one in ids), ids
    assert len(set(ids)) == len(ids)


def test_rules_are_of_fields_that_exist() -> None:
    """A field that was renamed takes its rule along."""
    fields = {
        (kind.__name__, field)
        for kind in _structs(msgspec.Struct)
        for field in getattr(kind, "__struct_fields__", ())
    }
    names = {field for _, field in fields}
    for rule in [*RANGES, *REPLACED]:
        assert rule in (fields if isinstance(rule, tuple) else names), rule


def _structs(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _structs(below)


def test_keys_are_told_of() -> None:
    made = document(routes(), ServerOptions(api_key=("k",)), vocab_size=VOCABULARY)
    assert set(made["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, methods in made["paths"].items():
        for operation in methods.values():
            guarded = path not in OPEN_PATHS
            assert ("security" in operation) == ("401" in operation["responses"]) == guarded, path


# ---- each range is the server's ---------------------------------------------------------------------------------------------


EDGES: dict[
    str, Callable[[Any, float], tuple[Any, Any]]
] = {  # of a rule: what just keeps it, and what does not
    "minimum": lambda limit, step: (limit, limit - step),
    "maximum": lambda limit, step: (limit, limit + step),
    "exclusiveMinimum": lambda limit, step: (limit + step, limit),
    "exclusiveMaximum": lambda limit, step: (limit - step, limit),
    "minLength": lambda limit, _: ("x" * limit, "x" * (limit - 1)),
    "maxLength": lambda limit, _: ("x" * limit, "x" * (limit + 1)),
    "maxItems": lambda limit, step: (_items(limit, step), _items(limit + 1, step)),
}


def _items(count: int, step: float) -> list[Any]:
    return [5 if step == 1 else "x"] * count


def edges(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(keyword, a value that just keeps it, one that does not) for each rule of a property's schema."""
    for one in schema.get("anyOf", [schema]):
        step = 1 if "integer" in (one.get("type"), one.get("items", {}).get("type")) else 1e-6
        for word, edge in EDGES.items():
            if word in one:
                yield word, *edge(one[word], step)
        if one.get("items", {}).get("type") == "integer":
            for word, good, bad in edges(one["items"]):
                yield f"items.{word}", [good], [bad]


def test_each_range_is_the_servers(server: Server, told: dict[str, Any]) -> None:
    """A value within it is not refused for its own sake; the next one without is, by the field's name."""
    checked = 0
    for kind, path in PATHS.items():
        schema = told["components"]["schemas"][kind]
        for field, rules in schema["properties"].items():
            for word, good, bad in edges(rules):
                if jsonschema_rs.is_valid(rules, bad):
                    continue  # another of the field's forms has room for it
                where = f"{kind}.{field} {word}"
                status, answer = server.post(path, _body(kind, field, good))
                assert status == 200, (where, good, answer)
                status, answer = server.post(path, _body(kind, field, bad))
                assert status == 400, (where, bad, answer)
                assert field in json.dumps(answer["error"]), (where, answer)
                checked += 1
    assert checked > 100


def _body(kind: str, field: str, value: Any) -> dict[str, Any]:
    body = copy.deepcopy(LEAST[kind])
    if kind in ("ChatBody", "CompletionBody"):
        body["max_tokens"] = 1
    if kind == "ResponsesBody":
        body["max_output_tokens"] = 1
    if field == "top_logprobs":
        body["logprobs"] = True
    if (kind, field, value) == ("CompletionBody", "max_tokens", 0):
        body["echo"] = True  # only then it asks for something
    if field == "n":
        body["best_of"] = value if isinstance(value, int) else None
    return body | {field: value}


def test_required_fields_are(server: Server, told: dict[str, Any]) -> None:
    for kind, path in PATHS.items():
        for field in told["components"]["schemas"][kind].get("required", ()):
            body = {name: value for name, value in LEAST[kind].items() if name != field}
            status, answer = server.post(path, body)
            assert status == 400 and field in answer["error"]["message"], (kind, field, answer)


@pytest.mark.parametrize("kind", LEAST)
def test_options_that_ask_for_nothing(server: Server, told: dict[str, Any], kind: str) -> None:
    """Null, metadata and what is off are taken as the document says; any other field is not."""
    for field, schema in told["components"]["schemas"][kind]["properties"].items():
        if field not in LEAST[kind] and "enum" in schema:
            for value in schema["enum"]:
                status, answer = server.post(PATHS[kind], _body(kind, field, value))
                assert status == 200, (field, value, answer)
    for value, status in ((None, 200), (0, 400)):
        assert server.post(PATHS[kind], _body(kind, "banana", value))[0] == status


def test_a_number_with_a_point_is_a_whole_one(server: Server) -> None:
    """JSON has one kind of number: 1.0 is an integer, 1.5 is none."""
    assert server.post("/v1/completions", {"prompt": [5.0, 6], "max_tokens": 1.0, "seed": 7.0})[0] == 200
    assert server.post("/detokenize", {"tokens": [5.0]}) == server.post("/detokenize", {"tokens": [5]})
    assert server.post("/v1/completions", {"prompt": [5.5], "max_tokens": 1})[0] == 400


def test_it_needs_no_key(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server(serving={"api_key": ("k",)}, log=tmp_path / "log")
    status, made = server.get("/openapi.json")
    assert status == 200 and "securitySchemes" in made["components"]


def test_a_405_tells_what_the_path_takes(server: Server) -> None:
    """The methods of all routes of a path, and of no other path that looks alike."""
    for path, methods in (
        ("/v1/responses/x", {"GET", "HEAD", "DELETE"}),
        ("/v1/responses/input_tokens", {"POST"}),
        ("/v1/models", {"GET", "HEAD"}),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("PATCH", path)
        response = connection.getresponse()
        assert response.status == 405
        assert set((response.headers["Allow"] or "").split(", ")) == methods
        connection.close()
