"""An engine that knows no model: a process that speaks the wire and emits scripted tokens, as fast as it is let.

A request whose ``cache_salt`` names a file ``<salt>.json`` in the scripts' folder gets that script (``Script``); any other
request gets ordinary tokens until ``max_tokens``. What a scripted request asked for is left in ``<salt>.params``, its tokens in
``<salt>.prompt``. One Outputs a step over all running requests, as the real engine.
``Stats.preemptions`` counts the aborts that arrived, so that tests can see them. With ``Options.drafts`` every step of a request
after its first says that it verified so many drafts, of which all its tokens but one stood.
"""

import os
import time
from pathlib import Path

import msgspec
import zmq

from flashstep.ipc.channel import Addresses, EngineEnd
from flashstep.ipc.messages import (
    Abort,
    Failed,
    Outputs,
    Ready,
    Rejected,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
)
from flashstep.request import Acceptance, Request, TokenLogprob

STATS_EVERY_S = 0.02


class Script(msgspec.Struct, kw_only=True):
    """``runs``: the tokens of each step. ``finish``: how it ends; also "reject", "die" (exit), "fail" (a message), "hang".

    Before a step of ``holds`` it waits for the file ``<salt>.go<step>``.
    """

    runs: list[list[int]] = []
    finish: str = "stop"
    stop_token: int | None = None
    cached: int = 0
    replayed: int = 0
    preemptions: int = 0
    step_s: float = 0.0
    holds: list[int] = []
    dies_of_abort: bool = False


class Options(msgspec.Struct, kw_only=True):
    """What ``main`` takes. ``words`` are the token ids of an unscripted answer, in turn."""

    folder: str
    scripts: str
    words: list[int]
    fingerprint: str
    max_model_len: int = 512
    vocab_size: int = 2048
    step_s: float = 0.001
    tokens_per_step: int = 1
    drafts: int = 0
    synthetic: bool = False
    scheduling_policy: str = "priority"


class _Counts:
    """What speculation did; no counts without drafts."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._histogram = [0] * (options.drafts + 1)

    def add(self, tokens: int) -> None:
        self._histogram[min(tokens - 1, self._options.drafts)] += 1

    @property
    def acceptance(self) -> Acceptance | None:
        k, histogram = self._options.drafts, self._histogram
        if not k:
            return None
        return Acceptance(
            synthetic=self._options.synthetic,
            num_tokens=k,
            steps=sum(histogram),
            draft_tokens=k * sum(histogram),
            accepted_tokens=sum(a * steps for a, steps in enumerate(histogram)),
            histogram=tuple(histogram),
            per_position=tuple(sum(histogram[i + 1 :]) for i in range(k)),
        )


class _Running:
    def __init__(self, request: Request, script: Script, counts: _Counts) -> None:
        self.request = request
        self.script = script
        self.counts = counts
        self.step = 0
        self.next_at = time.monotonic()

    def output(self) -> RequestOutput:
        script, step = self.script, self.step
        self.step += 1
        last = self.step >= len(script.runs)
        tokens = tuple(script.runs[step]) if script.runs else ()
        first = {}
        if step and tokens:
            self.counts.add(len(tokens))
        if step == 0:
            first = {
                "cached_tokens": script.cached,
                "replayed_tokens": script.replayed,
                "queued_s": 0.001,
                "prefill_s": 0.002,
                "prompt_logprobs": self._scores(self.request.prompt[1:], self.request.params.prompt_logprobs),
            }
        return RequestOutput(
            id=self.request.id,
            tokens=tokens,
            finish_reason=script.finish if last else None,
            stop_token=script.stop_token if last else None,
            acceptance=self.counts.acceptance if last else None,
            preemptions=script.preemptions,
            logprobs=self._scores(tokens, self.request.params.logprobs),
            **first,
        )

    @staticmethod
    def _scores(tokens: tuple[int, ...], count: int | None) -> tuple[TokenLogprob, ...]:
        if count is None:
            return ()
        best = [(0, -0.25 * (i + 1), i + 1) for i in range(count)]
        return tuple(
            TokenLogprob(
                t, -0.25, 1, tuple((t + i, logprob, rank) for i, (_, logprob, rank) in enumerate(best))
            )
            for t in tokens
        )


class StubEngine:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._end = EngineEnd(Addresses(folder=options.folder))
        self._poller = zmq.Poller()
        self._poller.register(self._end.readable, zmq.POLLIN)
        self._running: dict[str, _Running] = {}
        self._aborts = 0
        self._generated = 0
        self._prompted = 0
        self._steps = 0
        self._words_at = 0
        self._counts = _Counts(options)

    def run(self) -> None:
        self._end.send(
            Ready(
                max_model_len=self._options.max_model_len,
                max_num_seqs=256,
                num_blocks=100,
                block_size=32,
                hit_policy="exact",
                scheduling_policy=self._options.scheduling_policy,
                vocab_size=self._options.vocab_size,
                token_map_fingerprint=self._options.fingerprint,
            )
        )
        stats_at = 0.0
        while True:
            idle_ms = 5 if not self._running else 0
            if self._poller.poll(idle_ms):
                while (message := self._end.receive()) is not None:
                    if isinstance(message, Shutdown):
                        return
                    self._handle(message)
            self._step()
            now = time.monotonic()
            if now >= stats_at:
                stats_at = now + STATS_EVERY_S
                self._send_stats()

    def _handle(self, message: Submit | Abort) -> None:
        if isinstance(message, Abort):
            for request_id in message.request_ids:
                self._aborts += 1
                if (running := self._running.pop(request_id, None)) is not None:
                    if running.script.dies_of_abort:
                        os._exit(3)
                    counted = running.counts.acceptance
                    lost = running.script.preemptions
                    output = RequestOutput(
                        id=request_id, finish_reason="abort", acceptance=counted, preemptions=lost
                    )
                    self._end.send(Outputs(outputs=(output,)))
            return
        for request in message.whole():
            script = self._script(request)
            if script.finish == "die":
                os._exit(3)
            elif script.finish == "fail":
                self._end.send(Failed(reason="scripted failure"))
            elif script.finish == "reject":
                self._end.send(Rejected(request_id=request.id, reason="scripted rejection"))
            else:
                self._prompted += len(request.prompt)
                self._running[request.id] = _Running(request, script, _Counts(self._options))

    def _script(self, request: Request) -> Script:
        path = Path(self._options.scripts) / f"{request.cache_salt}.json"
        if request.cache_salt and path.exists():
            path.with_suffix(".params").write_bytes(msgspec.json.encode(request.params))
            path.with_suffix(".prompt").write_bytes(msgspec.json.encode(request.prompt))
            return msgspec.json.decode(path.read_bytes(), type=Script)
        options = self._options
        words = options.words
        self._words_at += 1
        tokens = [words[(self._words_at + i) % len(words)] for i in range(request.params.max_tokens)]
        width = options.tokens_per_step
        runs = [tokens[i : i + width] for i in range(0, len(tokens), width)]
        return Script(runs=runs, finish="length", step_s=options.step_s)

    def _step(self) -> None:
        now = time.monotonic()
        outputs = []
        for running in list(self._running.values()):
            if running.next_at > now or running.script.finish == "hang" or self._holds(running):
                continue
            running.next_at = max(
                running.next_at + running.script.step_s, now - 0.1
            )  # keeps its pace, catches up a little
            if running.step and running.script.runs:
                self._counts.add(len(running.script.runs[running.step]))
            output = running.output()
            self._generated += len(output.tokens)
            outputs.append(output)
            if output.finish_reason is not None:
                del self._running[running.request.id]
        if outputs:
            self._steps += 1
            self._end.send(Outputs(outputs=tuple(outputs)))
        elif self._running:
            time.sleep(0.0002)

    def _holds(self, running: _Running) -> bool:
        if running.step not in running.script.holds:
            return False
        return not (Path(self._options.scripts) / f"{running.request.cache_salt}.go{running.step}").exists()

    def _send_stats(self) -> None:
        self._end.send(
            Stats(
                running=len(self._running),
                waiting=0,
                cache_usage=len(self._running) / 256,
                prefix_queries=self._prompted,
                prefix_hits=0,
                preemptions=self._aborts,
                prompt_tokens=self._prompted,
                generation_tokens=self._generated,
                steps=self._steps,
                acceptance=self._counts.acceptance,
            )
        )


def main(options: Options) -> None:
    StubEngine(options).run()
