"""https: with a key and a certificate the server speaks it, to streams too, and nothing else on that port."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Server

CERTIFICATE = Path(__file__).parent / "certificate"


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    serving = {
        "ssl_keyfile": str(CERTIFICATE / "key.pem"),
        "ssl_certfile": str(CERTIFICATE / "certificate.pem"),
    }
    made = Server(tmp_path_factory.mktemp("scripts"), serving=serving)
    yield made
    made.stop()


def test_a_stream_over_tls(https: Server) -> None:
    body = {"model": "stub", "prompt": "the quick", "max_tokens": 3, "stream": True}
    url = f"https://127.0.0.1:{https.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    trusted = ssl.create_default_context(cafile=CERTIFICATE / "certificate.pem")
    with urllib.request.urlopen(request, timeout=20, context=trusted) as response:
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    told = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(one["text"] for one in told) and told[-1]["finish_reason"] == "length"


def test_no_plain_text_on_that_port(https: Server) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        https.get("/health")
