"""The two ends of the wire, over real sockets."""

import contextlib
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashstep.config.errors import ConfigError
from flashstep.ipc import messages
from flashstep.ipc.channel import Addresses, EngineEnd, ServerEnd
from flashstep.request import TokenLogprob
from tests.scheduler.driving import request


@pytest.fixture
def ends():
    addresses = Addresses.fresh()
    server, engine = ServerEnd(addresses), EngineEnd(addresses)
    yield server, engine
    engine.close()
    server.close()
    addresses.remove()
    assert not Path(addresses.folder).exists()


def wait_for(end):
    assert end.readable.poll(2000), "nothing came"
    return end.receive()


READY = messages.Ready(
    max_model_len=4,
    max_num_seqs=1,
    num_blocks=2,
    block_size=2,
    hit_policy="exact",
    vocab_size=9,
    token_map_fingerprint="f",
)
READY_BYTES = msgspec.msgpack.encode(READY)
STATS = messages.Stats(
    running=1,
    waiting=2,
    cache_usage=0.5,
    prefix_queries=3,
    prefix_hits=4,
    preemptions=5,
    prompt_tokens=6,
    generation_tokens=7,
    steps=8,
)
LOGPROB = TokenLogprob(3, -0.5, 2, ((4, -0.1, 1),))


@pytest.mark.parametrize(
    "message",
    [
        READY,
        STATS,
        messages.Rejected("r", "why"),
        messages.Failed("because"),
        messages.Outputs(
            (
                messages.RequestOutput(id="a", tokens=(1, 2), logprobs=(LOGPROB,)),
                messages.RequestOutput(
                    id="b", finish_reason="stop", stop_token=1, cached_tokens=0, queued_s=0.25
                ),
            )
        ),
    ],
)
def test_what_the_engine_says_arrives_unchanged(ends, message):
    server, engine = ends
    engine.send(message)
    assert wait_for(server) == message
    assert server.receive() is None


def test_what_the_server_says_arrives_unchanged_and_in_order(ends):
    server, engine = ends
    engine.send(READY)
    wait_for(server)
    full = request(
        "r", (1, 2, 3), 9, logit_bias={5: -1.0}, bad_words=((1, 2),), seed=-7, cache_salt="s", priority=-2
    )
    sent = [messages.Submit((full,)), messages.Abort(("r", "q")), messages.Shutdown()]
    for message in sent:
        server.send(message)
    assert [wait_for(engine) for _ in sent] == sent


def test_nothing_is_dropped_however_much_waits(ends):
    server, engine = ends
    for number in range(5000):
        engine.send(messages.Failed(str(number)))
    assert [wait_for(server).reason for _ in range(5000)] == [str(n) for n in range(5000)]


def test_only_its_user_may_enter_the_folder():
    addresses = Addresses.fresh()
    assert stat.S_IMODE(Path(addresses.folder).stat().st_mode) == 0o700
    addresses.remove()


def test_an_unknown_message_is_an_error(ends):
    server, engine = ends
    engine._out.send(msgspec.msgpack.encode({"type": "Surprise"}))
    assert server.readable.poll(2000)
    with pytest.raises(msgspec.ValidationError):
        server.receive()


def test_a_temporary_folder_with_too_long_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path holds 107 bytes; found by a CI run whose temporary folder was deep."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter one"):
        Addresses.fresh()
    assert not list(deep.iterdir())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=80), at=st.integers(0, 200), whole=st.sampled_from([b"", READY_BYTES]))
def test_bytes_that_are_no_message_are_said_to_be_none(ends, noise: bytes, at: int, whole: bytes) -> None:
    """Noise, and a message with noise in it, are a message or a ``DecodeError``; the next message is read as ever."""
    server, engine = ends
    engine._out.send(whole[:at] + noise + whole[at + len(noise) :])
    with contextlib.suppress(msgspec.DecodeError):
        wait_for(server)
    engine.send(READY)
    assert wait_for(server) == READY
