"""The terminal's HTTP client against a server on a real socket that says exactly what we choose."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings

from flashstep.cli import main
from flashstep.cli.remote import Delta, RemoteModel, read_event
from tests.json_values import texts

TEXT = "Paris [b]:smile:"  # nothing of it may be interpreted
CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "Hm. "}}]},
    {"choices": [{"delta": {"content": TEXT}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"total_tokens": 3}},
]


class Scripted(BaseHTTPRequestHandler):
    """Lists one model and streams ``CHUNKS``; refuses an unknown model, breaks a stream for the message "break"."""

    def do_GET(self) -> None:
        if self.server.key not in (None, self.headers["Authorization"]):
            self._send(401, json.dumps({"error": {"message": "no key"}}))
            return
        self._send(200, json.dumps({"data": [{"id": "scripted", "falsified_by": ["filled cache"]}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["model"] != "scripted":
            self._send(404, json.dumps({"error": {"message": "the model 'x' is not served here"}}))
            return
        events = list(CHUNKS)
        if body["messages"][-1]["content"] == "break":
            events = [CHUNKS[2], {"error": {"message": "the engine is gone"}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(200, ": a comment\n\n" + "".join(lines) + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.bodies = []
        server.key = None
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_answer_comes_in_pieces(server: ThreadingHTTPServer, suffix: str) -> None:
    remote = RemoteModel(url(server) + suffix)
    assert remote.model == "scripted"
    deltas = list(remote.stream([{"role": "user", "content": "hi"}], {"temperature": 0}))
    assert "".join(delta.reasoning for delta in deltas) == "Hm. "
    assert "".join(delta.content for delta in deltas) == TEXT
    assert server.bodies == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "temperature": 0,
        }
    ]


def test_refusals_and_broken_streams_are_sentences(server: ThreadingHTTPServer) -> None:
    with pytest.raises(ValueError, match="answered 404: the model 'x' is not served here"):
        list(RemoteModel(url(server), model="x").stream([], {}))
    stream = RemoteModel(url(server)).stream([{"role": "user", "content": "break"}], {})
    assert next(stream) == Delta("", TEXT)
    with pytest.raises(ValueError, match="the engine is gone"):
        next(stream)


def test_chat_keeps_the_conversation(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter(["capital of France?", "and again?"])

    def typed(_: str) -> str:
        try:
            return next(turns)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", "--url", url(server), "--system", "Be brief.", "--no-thinking"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count(TEXT) == 2 and "FILLED cache" in shown.err
    assert [message["role"] for message in server.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert server.bodies[1]["messages"][2]["content"] == TEXT
    assert server.bodies[0]["thinking"] == {"type": "disabled"}


def test_a_server_with_a_key(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "Bearer geheim"
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert main(["chat", "--url", url(server)]) == 2
    assert "answered 401: no key" in capsys.readouterr().err
    assert main(["chat", "--url", url(server), "--api-key", "geheim"]) == 0
    assert main(["chat", "x", "--api-key", "geheim"]) == 2
    assert "--api-key is for a server" in capsys.readouterr().err


def test_engine_options_mean_nothing_to_a_remote_chat(capsys: pytest.CaptureFixture[str]) -> None:
    """No option is read past: the server has its own."""
    assert (
        main(["chat", "--url", "http://127.0.0.1:1", "--speculative-config", "{}", "--max-num-seqs", "3"])
        == 2
    )
    shown = " ".join(capsys.readouterr().err.split())
    assert "--max-num-seqs, --speculative-config: engine options mean nothing with --url" in shown


@settings(max_examples=200, deadline=None)
@given(event=texts(["choices", "error", "delta"]))
def test_an_event_of_any_text_is_read_or_told(event: str) -> None:
    """A server of another kind may send anything."""
    try:
        for delta in read_event(event.encode("utf-8", errors="surrogatepass")):
            assert isinstance(delta.reasoning, str) and isinstance(delta.content, str)
    except ValueError as error:
        assert str(error)
