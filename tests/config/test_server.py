"""The server's options: what is refused in which words, where no other test file is of it."""

from pathlib import Path
from typing import Any

import pytest

from flashstep.config.server import ABOVE_ZERO, ServerOptions

CERTIFICATE = (
    Path(__file__).parents[1] / "server" / "certificate"
)  # signed by itself, of localhost, until 2126
KEY, CHAIN = str(CERTIFICATE / "key.pem"), str(CERTIFICATE / "certificate.pem")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ssl_keyfile": KEY}, "--ssl-keyfile and --ssl-certfile go together"),
        ({"ssl_certfile": CHAIN}, "--ssl-keyfile and --ssl-certfile go together"),
        ({"ssl_keyfile": KEY, "ssl_certfile": "/none.pem"}, "--ssl-certfile /none.pem and"),
        ({"ssl_keyfile": CHAIN, "ssl_certfile": CHAIN}, "cannot be used: "),
        ({"acceptance_log_s": -1.0}, "--acceptance-log-s is -1.0; it must be 0 or more"),
        ({"override_generation_config": '{"top_p": 2}'}, "--override-generation-config: top_p is 2; "),
        *(({name: 0}, f"--{name.replace('_', '-')} is 0; it must be above 0") for name in ABOVE_ZERO),
        ({"max_num_queued_reqs": -1}, "--max-num-queued-reqs is -1; it must be above 0"),
        ({"receive_timeout_s": float("nan")}, "--receive-timeout-s is nan"),
        ({"sse_keep_alive_interval": -1.0}, "--sse-keep-alive-interval is -1.0; it must be 0 or more"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout is -1; it must be 0 or more"),
        ({"api_key": ("", "good")}, "--api-key: a key is empty"),
        (
            {"api_key": ("two words",)},
            "--api-key: a key is empty, or has characters that no HTTP header carries",
        ),
        ({"api_key": ("ключ",)}, "--api-key: a key is empty, or has characters that no HTTP header carries"),
        ({"api_key_file": "/none/such"}, "--api-key-file /none/such cannot be read: "),
        ({"api_key_file": "/dev/null"}, "--api-key-file /dev/null holds no key"),
        (
            {"allowed_origins": ("example.com",)},
            "--allowed-origins holds 'example.com'; give *, or scheme://",
        ),
        ({"allowed_origins": ("https://a/b",)}, "--allowed-origins holds 'https://a/b'"),
        ({"allowed_origins": ('["*"]',)}, "--allowed-origins holds "),
        ({"allow_credentials": True}, "need --allowed-origins"),
        ({"allowed_methods": ("GET",)}, "need --allowed-origins"),
        (
            {"default_chat_template_kwargs": '{"x": 2}'},
            "--default-chat-template-kwargs: x is not a known field",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    (problem,) = ServerOptions(**options).problems()
    assert told in problem


def test_what_is_taken() -> None:
    assert ServerOptions(ssl_keyfile=KEY, ssl_certfile=CHAIN, acceptance_log_s=0.0).problems() == []


def test_keys_come_from_both_places_and_are_in_no_sentence(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n one \ntwo\n\n")
    options = ServerOptions(api_key=("three",), api_key_file=str(tmp_path / "keys"))
    assert options.problems() == [] and options.keys() == ("three", "one", "two")
    told = ServerOptions(api_key=("sesame", "se same"), api_key_file=str(tmp_path / "keys")).problems()
    assert len(told) == 1 and "same" not in told[0]


def test_origins_that_are_taken() -> None:
    given = ("*", "https://app.example.com", "http://localhost:3000", "chrome-extension://abcdef")
    assert ServerOptions(allowed_origins=given, allow_credentials=True).problems() == []
