"""An engine in this process, for commands that need no server: token ids in, outputs as they come.

Takes an ``EngineConfig``; loads with a progress bar. ``stream`` runs one request, ``run_all`` several at once. Knows text only
as far as it holds the checkpoint's tokenizer.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashstep.chat.tokenizer import TextTokenizer
from flashstep.cli.terminal import NOTES, note
from flashstep.config.engine import EngineConfig
from flashstep.engine.engine import Engine
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Acceptance, Request, SamplingParams
from flashstep.runner.build import build
from flashstep.runner.memory import comparison


class LocalModel:
    """A checkpoint, loaded and ready. Everything that is wrong with it is one ``ConfigError``."""

    def __init__(self, config: EngineConfig) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=NOTES, transient=True, disable=not NOTES.is_terminal) as bar:
            task = bar.add_task(f"loading {config.model}", total=None)
            built = build(config, progress=lambda done, of: bar.update(task, completed=done, total=of))
        if (
            built.pool.device.type == "cuda"
        ):  # on a CPU untouched caches take nothing, and the two cannot be compared
            note(comparison(built.memory, measured=built.measured_bytes))
        self.runner = built.runner
        self.engine = Engine(self.runner, seed=config.seed)
        self.max_model_len = self.runner.facts.max_model_len
        self.vocab_size = self.runner.facts.vocab_size
        self.tokenizer = TextTokenizer.from_file(config.model / "tokenizer.json")
        self._count = 0

    @property
    def acceptance(self) -> Acceptance | None:
        """What speculation has done since the start; None if the engine does not speculate."""
        return self.engine.stats().acceptance

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow ``prompt``; ``ValueError`` if none."""
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; the context length is {self.max_model_len}"
            )
        return room

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[RequestOutput]:
        """The outputs of one request, step by step. Leaving the iteration early aborts it."""
        request = self._request(prompt, params)
        try:
            self.engine.add(request)
            with closing(self.engine.steps()) as steps:
                for outputs in steps:
                    yield from outputs
        finally:
            self.engine.abort([request.id])

    def run_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str = "",
    ) -> list[list[RequestOutput]]:
        """All requests in one batch, to their ends; the outputs of each, in order. Other salts, other prefix caches."""
        requests = [
            self._request(prompt, p, cache_salt=cache_salt) for prompt, p in zip(prompts, params, strict=True)
        ]
        outputs = self.engine.generate(requests)
        return [outputs[request.id] for request in requests]

    def _request(self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str = "") -> Request:
        self._count += 1
        return Request(id=f"local-{self._count}", prompt=tuple(prompt), params=params, cache_salt=cache_salt)
