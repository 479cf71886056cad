"""What is no request, too much of one, or too slow: a 4xx or the end of the connection; no trace, nothing stuck, nothing lost."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Server
from tests.server.test_sse import comes_true

TLS = Path(__file__).parent / "certificate"
TEXT = "/v1/completions"
BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
QUICK = {"receive_timeout_s": 0.4, "send_timeout_s": 0.5, "keep_alive_timeout_s": 1}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose timeouts are short, and whose log is a file."""
    folder = tmp_path_factory.mktemp("scripts")
    made = Server(folder, serving=QUICK, log=folder / "log")
    yield made
    made.stop()
    assert "Traceback" not in (folder / "log").read_text()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def answer(connection: socket.socket) -> bytes:
    """Everything until the server ends the connection."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def sent(server: Server, data: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(data)
        return answer(connection)


def status(reply: bytes) -> int:
    """0 where there is no reply."""
    return int(reply.split(b" ", 2)[1]) if reply else 0


def after_an_answer(server: Server, data: bytes) -> bytes:
    """What comes after the first answer to a client that then sends ``data``; nothing if its connection was no longer kept."""
    with connect(server) as connection:
        connection.sendall(WHOLE)
        assert answered(connection) == 200
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        return answer(connection)


def answered(connection: socket.socket) -> int:
    """The status of the next answer, whose body is read to its end."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


GARBAGE = {
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/0.9": b"GET /health\r\n\r\n",
    "http/3.7": b"GET /health HTTP/3.7\r\n\r\n",
    "a method nobody knows": b"BANANA / HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
    "negative length": POST + b"Content-Length: -5\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "endless length": POST + b"Content-Length: 99999999999999999999999999\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "no chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "broken second chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzz\r\n",
    "control character": GET + b"X-A: a\x00b\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n",
    "no colon": GET + b"banana\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "path outside ascii": b"GET /\xff HTTP/1.1\r\n\r\n",
    "url without path": b"GET http://x HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage(impatient: Server, data: bytes) -> None:
    reply = sent(impatient, data)
    assert 400 <= status(reply) < 500, reply
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == status(reply)


def test_errors_of_anthropic_have_its_shape(impatient: Server) -> None:
    reply = sent(impatient, b"POST /v1/messages HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health?" + b"a" * 200_000, 414),
        (GET + b"X: y\r\n" * 300 + b"\r\n", 431),
        (GET + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (GET + b"X: " + b"y" * 400_000, 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nT: " + b"y" * 400_000, 431),  # a trailer
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"y" * 70_000, 431),  # of a chunk's size
    ],
)
def test_long_heads(impatient: Server, head: bytes, expected: int) -> None:
    assert status(sent(impatient, head)) == expected


def test_just_under_the_limits(impatient: Server) -> None:
    head = b"GET /health?" + b"a" * 8_000 + b" HTTP/1.1\r\nConnection: close\r\n"
    assert status(sent(impatient, head + b"X: y\r\n" * 250 + b"Y: " + b"y" * 50_000 + b"\r\n\r\n")) == 200


def test_half_requests_time_out(impatient: Server) -> None:
    """Slowloris: a head that never ends, a body that is never whole, silence; on a kept connection as well."""
    halves = [
        GET[:9],
        GET,
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ]
    for half in halves:
        assert status(sent(impatient, half)) == 408
    assert sent(impatient, b"") == b""
    assert comes_true(lambda: status(after_an_answer(impatient, b"\r\n")) == 408)  # of no request yet


def test_a_dripping_client_is_not_waited_for(impatient: Server) -> None:
    with connect(impatient) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        for byte in GET + b"X: " + b"y" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


def test_a_slow_but_steady_body_is_taken(impatient: Server) -> None:
    """It takes twice the timeout, at more than the least rate."""
    body = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * 20_000}).encode()
    with connect(impatient) as connection:
        whole = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        for at in range(0, len(whole), 1500):
            connection.sendall(whole[at : at + 1500])
            time.sleep(0.06)
        assert answered(connection) == 200


def test_what_is_sent_behind_a_request_is_not_answered(impatient: Server) -> None:
    """Pipelining: the first request is, and the connection ends; a disconnect is seen whatever was sent before it."""
    for surplus in (WHOLE, GET + b"\r\n", b"\x00garbage", WHOLE * 500):
        reply = sent(impatient, WHOLE + surplus)
        assert reply.count(b"HTTP/1.1 ") == 1 and status(reply) == 200
    impatient.script("slow", [[5]] * 100_000, finish="length", step_s=0.005)
    body = json.dumps({"prompt": "hi", "cache_salt": "slow"}).encode()
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) + WHOLE * 5)
        assert comes_true(lambda: impatient.metric("num_requests_running") == 1)
    assert comes_true(lambda: impatient.metric("num_requests_running") == 0)


def test_upgrades_are_declined_and_the_request_is_answered(server: Server) -> None:
    """As Java's client sends it, whose requests other servers lose the body of."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(POST + wish + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
            assert answered(connection) == 200
    closing = wish.replace(b"Upgrade,", b"close, upgrade,")
    assert status(sent(server, POST + closing + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY))) == 200
    with connect(server) as connection:  # the body comes later
        connection.sendall(POST + wish + b"Content-Length: %d\r\n\r\n" % len(BODY))
        time.sleep(0.05)
        connection.sendall(BODY)
        assert answered(connection) == 200


def test_expect_continue(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert answered(connection) == 200
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 10000000\r\n\r\n")
        assert answered(connection) == 413


def test_head_options_and_other_methods(impatient: Server) -> None:
    def ask(method: str, path: str) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", impatient.port, timeout=10)
        connection.request(method, path)
        response = connection.getresponse()
        found = response.status, response.getheader("allow"), response.read()
        connection.close()
        return found

    assert ask("HEAD", "/health") == (200, None, b"")
    assert ask("HEAD", TEXT) == (405, "POST", b"")
    for method in ("GET", "OPTIONS", "DELETE", "PUT"):
        got, allow, body = ask(method, TEXT)
        assert (got, allow) == (405, "POST") and json.loads(body)["error"]["code"] == 405
    got, allow, _ = ask("POST", "/v1/models")
    assert got == 405 and set((allow or "").split(", ")) == {"GET", "HEAD"}


def test_idle_connections_end(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(WHOLE)
        start = time.monotonic()
        reply = answer(connection)
        assert status(reply) == 200 and reply.count(b"HTTP/1.1 ") == 1
        assert time.monotonic() - start > 0.5


def test_a_client_that_does_not_read_is_dropped(impatient: Server) -> None:
    """Its stream would never end; the server holds a little of it and aborts the request."""
    flood = impatient.script("flood", [[5]] * 100_000, finish="length")
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    data = json.dumps({**body, **flood}).encode()  # an event has some kilobytes
    before = impatient.metric("request_success_total", finished_reason="abort")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        head = POST.replace(b"/completions", b"/chat/completions")
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        assert comes_true(
            lambda: impatient.metric("request_success_total", finished_reason="abort") == before + 1
        )
    assert comes_true(lambda: impatient.metric("num_requests_running") == 0)
    assert "the client does not read" in (impatient.scripts / "log").read_text()


def test_garbage_inside_tls(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """Such a connection cannot be half closed; the answer comes all the same."""
    files = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(TLS / "certificate.pem")}
    server = own_server(serving=files, log=tmp_path / "log")
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
    with trusting.wrap_socket(connect(server), server_hostname="localhost") as connection:
        connection.sendall(b"BANANA / HTTP/1.1\r\n\r\n")
        assert status(answer(connection)) == 400
    assert server.stop() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, len(WHOLE)),
    cut=st.integers(0, 20),
    put=st.binary(max_size=20)
    | st.sampled_from([b"\r\n", b"\r\n\r\n", b":", b"Transfer-Encoding: chunked\r\n", b"0"]),
)
def test_mutated_requests(impatient: Server, at: int, cut: int, put: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(WHOLE[:at] + put + WHOLE[at + cut :])
        connection.shutdown(socket.SHUT_WR)
        reply = answer(connection)
    assert not reply or status(reply) < 500, reply


def test_nothing_is_stuck(impatient: Server) -> None:
    """After all of the above: no descriptor but those of an idle server, and it serves."""

    def sockets() -> int:
        return sum(1 for fd in Path(f"/proc/{impatient.pid}/fd").iterdir() if fd.is_symlink())

    assert impatient.post(TEXT, {"prompt": "hi", "max_tokens": 2})[0] == 200
    assert comes_true(lambda: sockets() < 40), sockets()
