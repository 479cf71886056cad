"""``bench probe``: every step of one stream is kept, here and from a server whose times are known."""

import asyncio
import json
import os
import signal
import threading

import pytest
from aiohttp import web

from flashstep.bench.load.cards import cards, falsified_by, reasons
from flashstep.bench.probe import probe
from flashstep.bench.probe_http import probe_url
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import RejectionSampleMethod, SpeculativeOptions

SYNTHETIC = SpeculativeOptions(
    rejection_sample_method=RejectionSampleMethod.SYNTHETIC, synthetic_acceptance_length=3.5
)


@pytest.mark.parametrize("speculative", [None, SYNTHETIC], ids=["plain", "synthetic"])
def test_every_step_is_kept(speculative: SpeculativeOptions | None) -> None:
    report = probe(EngineConfig(model=tiny_model(), speculative=speculative), tokens=40)
    assert report.complete and report.decoded == 39 == sum(step.tokens or 0 for step in report.steps)
    assert all(step.us > 0 for step in report.steps)
    if speculative is None:
        assert len(report.steps) == 39 and report.tokens_a_step == 1
    else:
        assert 2.5 < report.tokens_a_step < 4.5 and report.falsified_by == ("synthetic acceptance",)
    assert report.us_a_token == pytest.approx(report.median_us / report.tokens_a_step)
    entry = report.entry()
    assert entry.metrics["step_us"] == report.median_us and len(entry.samples.keys) == len(report.steps)
    assert entry.metrics["tpot_ms"] == pytest.approx(report.us_a_token / 1000)
    again = probe(EngineConfig(model=tiny_model(), speculative=speculative), tokens=40)
    assert [step.tokens for step in again.steps] == [step.tokens for step in report.steps], "a fixed prompt"


def test_tokens_beyond_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="positions end at 1048576"):
        probe(EngineConfig(model=tiny_model()), tokens=1 << 20)


class Scripted:
    """Answers /v1/completions with chunks of ``sizes`` tokens, ``gap_s`` apart; ``dies_at`` closes behind so many."""

    def __init__(
        self, sizes: list[int], *, gap_s: float, dies_at: int | None = None, usage: bool = True
    ) -> None:
        self.sizes, self.gap_s, self.dies_at, self.usage = sizes, gap_s, dies_at, usage
        self.body: dict = {}

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "scripted", "falsified_by": ["synthetic acceptance", "uniform routing", "filled cache"]}
        return web.json_response({"data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        begun, total = loop.time(), 0
        for number, size in enumerate(self.sizes):
            if number == self.dies_at:
                assert request.transport is not None
                request.transport.close()
                return response
            await asyncio.sleep(begun + number * self.gap_s - loop.time())
            total += size
            reason = "length" if number + 1 == len(self.sizes) else None
            event = {"choices": [{"index": 0, "text": "x" * size, "finish_reason": reason}]}
            if self.usage:
                event["usage"] = {"prompt_tokens": 9, "completion_tokens": total}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.usage:
            last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": total}}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def probed(scripted: Scripted, *, tokens: int):
    async def both():
        app = web.Application()
        app.router.add_get("/v1/models", scripted.models)
        app.router.add_post("/v1/completions", scripted.completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await probe_url(f"http://127.0.0.1:{port}", tokens=tokens, model=None, api_key=None)
        finally:
            await runner.cleanup()

    return asyncio.run(both())


def test_a_servers_steps_are_its_chunks() -> None:
    sizes = [1, 3, 2, 4, 1, 3, 2, 3, 4, 2]
    scripted = Scripted(sizes, gap_s=0.02)
    report = probed(scripted, tokens=sum(sizes))
    assert report.complete and [step.tokens for step in report.steps] == sizes[1:]
    assert report.decoded == sum(sizes[1:]) and report.tokens_a_step == pytest.approx(24 / 9)
    assert report.median_us == pytest.approx(20_000, rel=0.3)
    assert scripted.body["ignore_eos"] is True and scripted.body["max_tokens"] == sum(sizes)
    entry = report.entry()
    assert entry.falsified_by == ("synthetic acceptance", "uniform routing", "filled cache")


@pytest.mark.parametrize(
    ("options", "tokens", "fault"),
    [
        ({"dies_at": 6}, 10, "cut off"),
        ({"usage": False}, 10, "does not tell how many tokens"),
        ({}, 12, "10 tokens came, and 12 were asked for"),
    ],
)
def test_what_a_server_does_wrong_is_a_fault(options: dict, tokens: int, fault: str) -> None:
    report = probed(Scripted([1] * 10, gap_s=0.001, **options), tokens=tokens)
    assert not report.complete and len(report.faults) == 1 and fault in report.faults[0]
    assert len(report.steps) == (5 if "dies_at" in options else 9), "what came is kept"
    assert not report.entry().complete


def test_no_server_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="lists no model"):
        asyncio.run(probe_url("http://127.0.0.1:9", tokens=5, model=None, api_key=None))


@pytest.mark.parametrize(
    "listed",
    [None, b"", b"[]", b'{"data": 3}', b'{"data": [{}]}', b'{"data": [{"id": "m", "falsified_by": 3}]}'],
)
def test_lists_of_models_that_say_nothing(listed: bytes | None) -> None:
    assert all(reasons(card) == () for card in cards(listed).values())


def test_what_falsifies_a_run_is_what_its_server_says_and_what_was_counted() -> None:
    card = {"id": "m", "falsified_by": ["filled cache"]}
    assert falsified_by(card, synthetic=False) == ("filled cache",)
    assert falsified_by(card, synthetic=True) == ("synthetic acceptance", "filled cache")
    assert falsified_by(None, synthetic=False) == ()
    assert not probed(Scripted([1] * 9, gap_s=0), tokens=9).is_interrupted


def test_ctrl_c_ends_a_probe_of_a_server_as_one_here() -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    report = probed(Scripted([1] * 400, gap_s=0.02), tokens=400)
    assert report.is_interrupted and not report.complete and report.faults == ("it was interrupted",)
