"""What every request passes: ids, the log line, the load, keys, rules for other sites' pages."""

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from flashstep.server.keys import OPEN_PATHS
from tests.server.conftest import MODEL, Server
from tests.server.test_sse import comes_true

CHAT = "/v1/chat/completions"
KEYS = ("sesame-8d1f", "tahini-77aa")
FILED = "from-a-file-19c2"
PAGE = "https://app.example.com"
HI = {"messages": [{"role": "user", "content": "my secret sentence"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys, for the pages of one site."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "keys").write_text(f"\n{FILED}\n\n")
    serving = {
        "api_key": KEYS,
        "api_key_file": str(folder / "keys"),
        "allowed_origins": (PAGE,),
        "allow_credentials": True,
        "sse_keep_alive_interval": 0.1,
    }
    made = Server(folder, serving=serving, log=folder / "log")
    yield made
    made.stop()


def log_of(server: Server) -> str:
    return (server.scripts / "log").read_text()


def ask(
    server: Server, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """``headers`` with underscores for dashes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), named)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.headers, data


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*KEYS, FILED])
def test_each_key_opens(locked: Server, key: str) -> None:
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"authorization": f"bearer {key}"},
        {"x_api_key": key},
    ):
        assert ask(locked, "POST", CHAT, HI, **headers)[0] == 200
    with openai.OpenAI(base_url=f"{locked.base}/v1", api_key=key, max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
        {"Authorization": "Bearer \xff"},
        {"x_api_key": ""},
        {"x_api_key": "wrong"},
    ],
)
def test_nothing_else_does(locked: Server, headers: dict[str, str]) -> None:
    status, got, body = ask(locked, "POST", CHAT, HI, **headers)
    assert status == 401 and got["www-authenticate"] == "Bearer"
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", 401, None)


def test_what_is_open_and_what_is_guarded(locked: Server) -> None:
    """A path nobody has thought of is guarded."""
    for path in (
        "/v1/models",
        "/v1/models/x",
        "/tokenize",
        "/nothing",
        "//v1/models",
        "/%761/models",
        "/V1/models",
    ):
        assert ask(locked, "GET", path)[0] == 401, path
    for path in OPEN_PATHS:
        assert ask(locked, "GET", path)[0] == 200, path
    assert ask(locked, "OPTIONS", CHAT)[0] == 405
    status, _, body = ask(locked, "POST", "/v1/messages", {})
    assert status == 401 and json.loads(body)["error"]["type"] == "authentication_error"


def test_openai_client_knows_the_error(locked: Server) -> None:
    client = openai.OpenAI(base_url=f"{locked.base}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        client.models.list()


def test_keys_are_told_nowhere(locked: Server) -> None:
    for path in ("/openapi.json", "/metrics", "/version"):
        body = ask(locked, "GET", path)[2].decode()
        assert not any(key in body for key in (*KEYS, FILED))
    assert not any(key in log_of(locked) for key in (*KEYS, FILED))
    engine = Path(f"/proc/{locked.engine_pid}/cmdline").read_bytes().decode()
    assert not any(key in engine for key in (*KEYS, FILED))


# ---- pages of other sites ------------------------------------------------------------------------------------------


def test_cors(locked: Server) -> None:
    asked = {
        "Origin": PAGE,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization",
    }
    status, headers, _ = ask(locked, "OPTIONS", CHAT, **asked)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-credentials"] == "true"
    assert ask(locked, "OPTIONS", CHAT, **asked | {"Origin": "https://evil.example"})[0] == 400
    for key, expected in ((KEYS[0], 200), ("wrong", 401)):  # a page can read why it was refused
        status, headers, _ = ask(locked, "POST", CHAT, HI, Origin=PAGE, Authorization=f"Bearer {key}")
        assert status == expected and headers["access-control-allow-origin"] == PAGE
    headers = ask(locked, "POST", CHAT, HI, Origin="https://evil.example", Authorization=f"Bearer {KEYS[0]}")[
        1
    ]
    assert "access-control-allow-origin" not in headers


def test_cors_is_off_unless_asked_for(server: Server) -> None:
    status, headers, _ = ask(server, "GET", "/v1/models", Origin=PAGE)
    assert status == 200 and not any(name.startswith("access-control") for name in headers)
    assert ask(server, "OPTIONS", CHAT, Origin=PAGE, Access_Control_Request_Method="POST")[0] == 405
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, _, body = ask(server, "POST", CHAT, HI, Content_Type=kind)  # what a page may send unasked
        assert status == 415 and kind in json.loads(body)["error"]["message"]
    assert ask(server, "POST", CHAT, HI, Content_Type="Application/JSON; charset=utf-8")[0] == 200
    assert ask(server, "POST", CHAT, HI, Content_Encoding="gzip")[0] == 415


CROSS = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}


@pytest.mark.parametrize(
    "headers",
    [
        CROSS,
        CROSS | {"Origin": PAGE},
        {"Origin": PAGE},  # a browser that tells no more, or a server that is not on https
        {"Origin": "null"},
        {"Sec_Fetch_Site": "same-site", "Origin": "http://localhost:3000"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://evil.example", "Host": "evil.example"},  # a name that leads here
        {"Sec_Fetch_Site": "same-origin", "Host": "evil.example:8000"},
    ],
)
def test_pages_of_other_sites_have_nothing_made(server: Server, headers: dict[str, str]) -> None:
    """Without a Content-Type no browser asks first, and none lets a page leave these headers out."""
    for method, path in (("POST", CHAT), ("POST", "/v1/messages"), ("DELETE", "/v1/responses/resp_1")):
        status, _, body = ask(server, method, path, HI, **headers)
        error = json.loads(body)["error"]
        assert status == 403 and "may not call this server" in error["message"]
        assert "--allowed-origins" in error["message"]
        assert error["type"] == ("permission_error" if path == "/v1/messages" else "PermissionDeniedError")
    assert ask(server, "GET", "/health", **headers)[0] == 200


def test_own_pages_and_programs_have(server: Server) -> None:
    own = f"127.0.0.1:{server.port}"
    for headers in (
        {},
        {"Origin": f"http://{own}"},
        {"Origin": f"http://{own}", "Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "none"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"},
        {"Host": "192.168.0.7", "Origin": "https://192.168.0.7", "Sec_Fetch_Site": "same-origin"},
        {"Host": "any.example"},  # no browser
    ):
        assert ask(server, "POST", CHAT, HI, **headers)[0] == 200, headers


def test_where_there_are_keys_any_name_is_ours(locked: Server) -> None:
    """And an allowed site may call from anywhere, and no other."""
    named = {"Host": "gpu.example", "Origin": "https://gpu.example", "x_api_key": KEYS[0]}
    assert ask(locked, "POST", CHAT, HI, **named)[0] == 200
    assert ask(locked, "POST", CHAT, HI, Origin=PAGE, x_api_key=KEYS[0], **CROSS)[0] == 200
    assert ask(locked, "POST", CHAT, HI, x_api_key=KEYS[0], **CROSS | {"Origin": PAGE + ".evil"})[0] == 403


@pytest.mark.parametrize("path", [CHAT + "/", "/v1/models/", "/health/", "/v1/messages/"])
def test_a_slash_too_many_is_no_path(server: Server, path: str) -> None:
    """No redirect, whose address would be made of what the client calls the host."""
    for method in ("GET", "POST"):
        status, headers, body = ask(server, method, path, Host="evil.example")
        assert status in (404, 405) and "location" not in headers
        assert b"evil" not in body and json.loads(body)["error"]


# ---- ids and the log -----------------------------------------------------------------------------------------------


def test_request_ids(server: Server) -> None:
    for stream in (False, True):
        status, headers, body = ask(server, "POST", CHAT, HI | {"stream": stream}, X_Request_Id="trace-42")
        assert status == 200 and headers["x-request-id"] == "trace-42"
        assert b'"id":"chatcmpl-trace-42"' in body
    _, headers, body = ask(server, "POST", CHAT, HI)
    assert json.loads(body)["id"] == "chatcmpl-" + headers["x-request-id"]
    for path in ("/health", "/nothing"):
        assert ask(server, "GET", path, X_Request_Id="abc")[1]["x-request-id"] == "abc"
    for bad in ("a b", "x" * 129, "", "\xe9"):
        status, headers, body = ask(server, "POST", CHAT, HI, X_Request_Id=bad)
        assert status == 400 and headers["x-request-id"] != bad
        assert "x-request-id" in json.loads(body)["error"]["message"]
    assert server.post(CHAT, HI | {"request_id": "trace-43"})[1]["id"] == "chatcmpl-trace-43"
    for bad in ("a b", "x" * 129, "", "\xe9", "a\nb", "\0", "\x7f"):
        status, answer = server.post(CHAT, HI | {"request_id": bad})
        assert (status, answer["error"]["param"]) == (400, "request_id"), bad


def test_one_line_a_request(locked: Server) -> None:
    def line(name: str) -> str:
        assert comes_true(lambda: f" id={name} " in log_of(locked))
        found = [line for line in log_of(locked).splitlines() if f" id={name} " in line]
        assert len(found) == 1
        return found[0]

    key = {"x_api_key": KEYS[0]}
    for name, stream in (("whole", False), ("streamed", True)):
        ask(locked, "POST", CHAT, HI | {"stream": stream, "n": 2}, X_Request_Id=name, **key)
        told = line(name)
        assert " INFO request answered " in told and f" method=POST path={CHAT} status=200 seconds=" in told
        assert re.search(
            r" choices=2 prompt_tokens=\d+ cached_tokens=0 completion_tokens=6 finish=length$", told
        )
    for path, body in (
        ("/v1/messages", {"messages": HI["messages"], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ):
        assert ask(locked, "POST", path, body, X_Request_Id=path[4:], **key)[0] == 200
        assert line(path[4:]).endswith(" completion_tokens=3 finish=length")
    ask(locked, "GET", "/v1/models?secret=1", X_Request_Id="refused")
    assert line("refused").split(" status=")[1].startswith("401 ")
    ask(locked, "GET", "/health", X_Request_Id="probe")
    assert ask(locked, "POST", "/tokenize", {"prompt": 5}, X_Request_Id="bad", **key)[0] == 400
    assert " status=400 " in line("bad") and line("bad").endswith(" param=prompt")
    body = {"messages": "x", "geheim": 1}
    assert ask(locked, "POST", CHAT, body, X_Request_Id="theirs", **key)[0] == 400
    assert line("theirs").endswith(" param=(unknown)")  # a name that the client made up is no text for a log
    text = log_of(locked)
    assert "probe" not in text and "secret" not in text


def test_the_client_is_who_connected(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """Not who it says it speaks for; and what the environment says is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORWARDED_ALLOW_IPS", "*")
        patch.setenv("WEB_CONCURRENCY", "many")
        server = own_server(log=tmp_path / "log")
    forwarded = {"X_Forwarded_For": "6.6.6.6", "Forwarded": "for=6.6.6.6"}
    assert ask(server, "GET", "/v1/models", X_Request_Id="forwarded", **forwarded)[0] == 200
    assert comes_true(lambda: " id=forwarded client=127.0.0.1 " in (tmp_path / "log").read_text())


def test_who_hangs_up_is_logged_so(locked: Server) -> None:
    for name, stream, status in (("gone", False, 499), ("cut", True, 200)):
        connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
        headers = {"X-Request-Id": name, "x-api-key": KEYS[0]}
        slow = locked.script("slow", [[5]] * 100_000, finish="length", step_s=0.005)
        connection.request(
            "POST", CHAT, json.dumps(HI | {"stream": stream, "max_tokens": 400} | slow), headers
        )
        if stream:
            assert connection.getresponse().status == 200
        assert comes_true(lambda: locked.was_asked("slow"))
        connection.close()
        assert comes_true(lambda name=name: f" id={name} " in log_of(locked))
        told = next(line for line in log_of(locked).splitlines() if f" id={name} " in line)
        assert f" status={status} " in told and told.endswith("finish=abort")


def test_no_log_and_load(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server(serving={"disable_uvicorn_access_log": True}, log=tmp_path / "log")
    assert server.get("/load") == (200, {"server_load": 0})
    server.script("slow", [[5]] * 100_000, finish="length", step_s=0.005)
    connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(3)]
    for connection in connections:
        connection.request("POST", CHAT, json.dumps(HI | {"cache_salt": "slow"}))
    assert comes_true(lambda: server.get("/load") == (200, {"server_load": 3}))
    for connection in connections:
        connection.close()
    assert comes_true(lambda: server.get("/load") == (200, {"server_load": 0}))
    assert "answered" not in (tmp_path / "log").read_text()


# ---- long silences ---------------------------------------------------------------------------------------------------


def test_anthropics_client_skips_comments(locked: Server) -> None:
    late = locked.script("late", [[], [], [5], [6]], finish="length", step_s=0.15)
    talk: Any = [{"role": "user", "content": "hi"}]
    with (
        anthropic.Anthropic(base_url=locked.base, api_key=KEYS[0], max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=9, messages=talk, extra_body=late) as events,
    ):
        kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_comments_keep_a_silent_stream(locked: Server) -> None:
    """Headers before the first token, comments while nothing comes, few where much does; openai's client sees events only."""

    def streamed(extra: dict[str, str]) -> list[str]:
        asked = {"prompt": "x", "stream": True, **extra}
        return ask(locked, "POST", "/v1/completions", asked, x_api_key=KEYS[1])[2].decode().split("\n\n")

    hangs = locked.script("hang", [[5]], finish="hang")
    with openai.OpenAI(base_url=f"{locked.base}/v1", api_key=KEYS[0], max_retries=0, timeout=10) as client:
        client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=hangs).close()
        late = locked.script("late", [[], [], [], [5], [6], [7]], finish="length", step_s=0.15)
        chunks = list(client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=late))
    assert chunks[-1].choices[0].finish_reason == "length"
    frames = streamed(late)
    assert frames.count(": keep-alive") >= 3 and frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames if frame and frame != ": keep-alive")
    quick = locked.script("quick", [[5]] * 100, finish="length", step_s=0.02)
    # 20 are what a clock would send; a busy machine makes silences of its own
    assert comes_true(lambda: streamed(quick).count(": keep-alive") < 10)
