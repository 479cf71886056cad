"""``flashstep bench probe`` (spec/serving.md E11): one stream decodes 6,000 tokens; the score is the median of its steps.

Stray hiccups of the host do not move a median, so it accepts or rejects a small change. Every step's wall time is kept; nothing
traces it. Here the engine is in this process, and a step is from commit to commit; ``probe_http`` asks a server. Takes an
``EngineConfig``; gives ``ProbeReport``.
"""

import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.offline import INTERRUPTED, Offline, Timed, settings_of
from flashstep.bench.origin import Origin, origin
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.request import Request, SamplingParams

PROMPT_TOKENS = 128
SEED = 6000  # of the prompt, which is the same everywhere


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """A step behind the first token: wall time, and the tokens it brought (None: the server does not tell)."""

    us: float
    tokens: int | None


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every step. ``tokens`` were asked for; ``decoded`` are those of the steps, all but the first step's."""

    origin: Origin
    subject: dict[str, Any]
    settings: dict[str, Any]
    tokens: int
    decoded: int
    steps: tuple[Probed, ...]
    falsified_by: tuple[str, ...]
    faults: tuple[str, ...] = ()
    complete: bool = True

    @property
    def is_interrupted(self) -> bool:
        return INTERRUPTED in self.faults

    @property
    def median_us(self) -> float:
        """The score."""
        return statistics.median(step.us for step in self.steps)

    @property
    def tokens_a_step(self) -> float:
        return self.decoded / len(self.steps)

    @property
    def us_a_token(self) -> float:
        """The median step over the tokens that a step brings in the mean."""
        return self.median_us / self.tokens_a_step

    def entry(self) -> Entry:
        """For the ledger: a sample for each step."""
        metrics = {}
        if self.steps and self.decoded:
            metrics = {
                "step_us": self.median_us,
                "tpot_ms": self.us_a_token / 1000,
                "acceptance_length": self.tokens_a_step,
            }
        return Entry(
            kind="probe",
            origin=self.origin,
            settings=self.settings,
            subject=self.subject,
            samples=Samples.of_steps((step.us for step in self.steps), (step.tokens for step in self.steps)),
            metrics=metrics,
            seed=SEED,
            faults=self.faults,
            complete=self.complete,
            falsified_by=self.falsified_by,
        )


def probe(
    config: EngineConfig,
    *,
    tokens: int,
    shapes: ModelConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeReport:
    """Build the engine that ``config`` says and probe it; Ctrl-C ends it early, with what there is."""
    model = shapes or ModelConfig.read(config.model)
    longest = PROMPT_TOKENS + tokens
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"--tokens {tokens} behind a prompt of {PROMPT_TOKENS} make {longest}; the model's positions end at "
            f"{model.max_position_embeddings}"
        )
    config = msgspec.structs.replace(
        config,
        max_num_seqs=1,
        max_model_len=min(longest + 1, model.max_position_embeddings),
        enable_prefix_caching=False,
    )
    offline = Offline(config, shapes=shapes)
    progress(f"built: {tokens} tokens behind {PROMPT_TOKENS}")
    prompt = random.Random(SEED).choices(range(offline.engine.ready.vocab_size), k=PROMPT_TOKENS)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    offline.engine.add(Request(id="probe", prompt=tuple(prompt), params=params))
    taken: list[Timed] = []
    faults: list[str] = []
    try:
        for step in offline.steps():
            taken.append(step)  # one by one: what there is when somebody interrupts is kept
    except KeyboardInterrupt:
        faults.append(INTERRUPTED)
    first = next((place for place, step in enumerate(taken) if step.tokens), len(taken))
    steps = tuple(Probed(us=step.us, tokens=sum(step.tokens)) for step in taken[first + 1 :] if step.tokens)
    return ProbeReport(
        origin=origin(),
        subject=offline.subject,
        settings={"tokens": tokens, "prompt": f"{PROMPT_TOKENS} ids of seed {SEED}", **settings_of(config)},
        tokens=tokens,
        decoded=sum(step.tokens or 0 for step in steps),
        steps=steps,
        falsified_by=config.falsifies,
        faults=tuple(faults),
        complete=not faults,
    )
