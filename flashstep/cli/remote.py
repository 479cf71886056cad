"""A chat over HTTP: one streamed request to any OpenAI-compatible server, as deltas of reasoning and content.

Takes a base URL and messages; gives ``Delta`` pieces. The standard library's client is enough for one stream, and the
package needs no client dependency for it. Knows no terminal.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

DATA = b"data:"
DONE = b"[DONE]"


class Delta(NamedTuple):
    """What one event added to the answer."""

    reasoning: str
    content: str


class RemoteModel:
    """One served model. ``base_url`` is with or without /v1; ``model`` None takes the first the server lists.

    ``api_key`` is sent as a bearer token.
    """

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        if not root.startswith(("http://", "https://")):
            raise ValueError(f"--url is {base_url!r}; it begins with http:// or https://")
        self._root = root
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        card = self._card(model)
        self.model = card["id"]
        self.falsified_by = tuple(
            map(str, card.get("falsified_by") or ())
        )  # why its texts are wrong on purpose

    def stream(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Iterator[Delta]:
        """The answer to ``messages``, piece by piece; ``options`` are further fields of the request."""
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(DATA):
                    continue
                event = line[len(DATA) :].strip()
                if event == DONE:
                    return
                yield from read_event(event)

    def _card(self, model: str | None) -> dict[str, Any]:
        """What the server says of ``model``, None: of its first."""
        if model is not None:
            return {"id": model}
        with self._open("/v1/models") as response:
            listed = json.load(response)["data"]
        if not listed:
            raise ValueError(f"{self._root} serves no model")
        return listed[0]

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._root}{path} answered {error.code}: {_reason(error)}") from None
        except urllib.error.URLError as error:
            raise ValueError(f"{self._root} cannot be reached: {error.reason}") from None


class _EventDelta(msgspec.Struct):
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None


class _EventChoice(msgspec.Struct):
    delta: _EventDelta | None = None


class _Event(msgspec.Struct):
    choices: list[_EventChoice] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def read_event(data: bytes) -> Iterator[Delta]:
    """The deltas of one event's data; ``ValueError`` if it is an error, or no event of a chat."""
    try:
        event = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the server sent what is no event of a chat: {error}") from None
    if event.error is not None:
        told = event.error.get("message") if isinstance(event.error, dict) else None
        raise ValueError(f"the server ended the stream: {told or event.error}")
    for choice in event.choices or ():
        delta = choice.delta or _EventDelta()
        yield Delta(delta.reasoning_content or delta.reasoning or "", delta.content or "")


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's sentence, or its raw words where it sent no JSON."""
    raw = error.read().decode("utf-8", errors="replace")
    try:
        return json.loads(raw)["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return raw[:200]
