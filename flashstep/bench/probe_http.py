"""The probe at a URL (``probe``): one streamed completion; a step is from one chunk of content to the next, as a client sees it.

A server whose chunks hold the tokens of one step each, as this one's do, is measured with its way through HTTP. A token without
text (a part of a character) has no chunk: its step is then a part of the next one's. Takes a URL; gives ``ProbeReport``.
"""

import asyncio
import itertools
import signal

from flashstep.bench.load.cards import cards, reasons
from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.offline import INTERRUPTED
from flashstep.bench.origin import origin
from flashstep.bench.probe import Probed, ProbeReport

TEXT = "The probe counts the steps of one stream, and each of them is timed. " * 8


async def probe_url(url: str, *, tokens: int, model: str | None, api_key: str | None) -> ProbeReport:
    """Probe ``model`` (None: the first that is listed) at ``url``; what goes wrong, or Ctrl-C, is a fault of the report.

    ``ValueError`` where no model is listed and none was named.
    """
    async with Client(url, api_key=api_key) as client:
        listed = cards(await client.get("/v1/models"))
        model = model or next(iter(listed), None)
        if model is None:
            raise ValueError(
                f"{client.root}/v1/models lists no model; name one with --served-model, if there is a server"
            )
        wrong = reasons(listed.get(model))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, client.interrupt)
        answered = await client.send(Call(key="probe", path="/v1/completions", body=_body(model, tokens)))
    faults = _faults(answered, tokens=tokens)
    return ProbeReport(
        origin=origin(),
        subject={"url": client.root, "model": model},
        settings={
            "tokens": tokens,
            "prompt": "the text of bench.probe",
        },
        tokens=tokens,
        decoded=_decoded(answered),
        steps=_steps(answered),
        falsified_by=wrong,
        faults=faults,
        complete=not faults,
    )


def _body(model: str, tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": TEXT,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _steps(answered: Answered) -> tuple[Probed, ...]:
    """Gaps between chunks of content, each with the tokens of the chunk that ends it."""
    content = [chunk for chunk in answered.chunks if chunk.is_content]
    return tuple(
        Probed(us=1e6 * (after.at_s - before.at_s), tokens=after.tokens)
        for before, after in itertools.pairwise(content)
    )


def _decoded(answered: Answered) -> int:
    """Tokens behind the first chunk; where chunks do not tell of theirs, that one is taken to hold one token (H14)."""
    content = [chunk for chunk in answered.chunks if chunk.is_content]
    if answered.output_tokens is None or not content:
        return 0
    return answered.output_tokens - (content[0].tokens or 1)


def _faults(answered: Answered, *, tokens: int) -> tuple[str, ...]:
    if answered.fault == "interrupted":
        return (INTERRUPTED,)
    if answered.fault:
        return (f"{answered.fault}: {answered.error}",)
    if answered.output_tokens is None:
        return ("the server does not tell how many tokens it gave, so there is no time a token",)
    if answered.output_tokens != tokens:
        return (f"{answered.output_tokens} tokens came, and {tokens} were asked for",)
    return ()
