"""``flashstep bench decode``: steady-state decoding at a context, without paying for the prompts (spec/serving.md E7).

Requests are admitted as if their prompts' caches had been handed over: true blocks, every group filled, nothing replayed; then
the engine's own loop decodes them. Steps are counted behind some that warm up, and no request ends before the last of them.
Takes an ``EngineConfig``; gives ``DecodeReport``.
"""

import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.offline import (
    INTERRUPTED,
    Balance,
    Offline,
    Timed,
    balance,
    settings_of,
    tokens_a_step,
)
from flashstep.bench.origin import Origin, origin
from flashstep.bench.results import percentile
from flashstep.cache.budget import plan_cache
from flashstep.cache.groups import CacheGroups
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.request import Request, SamplingParams

TAIL = 32  # last tokens of a prompt, which are each request's own; those before are common: nobody computes or looks them up
SHARES = (0.5, 0.9, 0.99)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``batch_size`` requests behind ``context`` tokens each; ``steps`` are counted, behind ``warm_up`` that are not."""

    context: int
    batch_size: int
    steps: int
    warm_up: int
    temperature: float = 1.0


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every counted step. ``drafts`` are the most that a step verifies of a request; ``faults`` say what was not steady."""

    origin: Origin
    subject: dict[str, Any]
    settings: dict[str, Any]
    excluded: tuple[str, ...]
    seed: int
    workload: Workload
    drafts: int
    falsified_by: tuple[str, ...]
    steps: tuple[Timed, ...]
    balance: Balance | None
    replayed: dict[str, int] | None = (
        None  # where routing was recorded: loads by how they were made (``runner.sources.Recorded``)
    )
    faults: tuple[str, ...] = ()
    complete: bool = True

    def step_us(self, share: float) -> float:
        """The percentile of the counted steps."""
        return percentile([step.us for step in self.steps], share)

    @property
    def median_us(self) -> float:
        return statistics.median(step.us for step in self.steps)

    @property
    def tokens_a_step(self) -> float:
        return tokens_a_step(self.steps)

    @property
    def tokens_a_second(self) -> float:
        """Of all requests together."""
        return 1e6 * sum(sum(step.tokens) for step in self.steps) / sum(step.us for step in self.steps)

    @property
    def last_context(self) -> float:
        """Tokens before a request's newest one when the last step is counted, in the mean."""
        rest = self.workload.warm_up + len(self.steps)
        return self.workload.context + (self.tokens_a_step * rest if self.steps else 0)

    def entry(self) -> Entry:
        """For the ledger: a sample for each counted step."""
        metrics = {}
        if self.steps:
            metrics = {
                "step_us": self.median_us,
                "acceptance_length": self.tokens_a_step,
                "output_tps": self.tokens_a_second,
            }
        if self.balance is not None:
            metrics["balancedness"] = self.balance.mean
        return Entry(
            kind="decode",
            origin=self.origin,
            settings=self.settings,
            subject=self.subject,
            samples=Samples.of_steps(
                (step.us for step in self.steps), (sum(step.tokens) for step in self.steps)
            ),
            metrics=metrics,
            seed=self.seed,
            detail={
                **({} if self.balance is None else {"balance": msgspec.to_builtins(self.balance)}),
                **({} if self.replayed is None else {"replayed": self.replayed}),
            },
            faults=self.faults,
            complete=self.complete,
            falsified_by=self.falsified_by,
        )


def measure(
    config: EngineConfig,
    workload: Workload,
    *,
    shapes: ModelConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> DecodeReport:
    """Build the engine that ``config`` says and decode; Ctrl-C ends it early, with what there is.

    ``ValueError`` where the model has no room for the context and what is decoded behind it.
    """
    model = shapes or ModelConfig.read(config.model)
    config = engine_for(config, model, workload)
    offline = Offline(config, shapes=shapes)
    progress(f"built: {workload.batch_size} requests behind {workload.context} tokens")
    for request in requests_of(
        workload, vocabulary=offline.engine.ready.vocab_size, seed=config.seed, limit=config
    ):
        offline.engine.add(request)
    steps: list[Timed] = []
    faults: list[str] = []
    try:
        for step in itertools.islice(offline.steps(), 1 + workload.warm_up + workload.steps):
            steps.append(step)  # one by one: what there is when somebody interrupts is kept
    except KeyboardInterrupt:
        faults.append(INTERRUPTED)
    counted = tuple(steps[1 + workload.warm_up :])  # the first is that of the admission, and fills the caches
    unsteady = sum(len(step.tokens) != workload.batch_size for step in counted)
    if unsteady:
        faults.append(
            f"{unsteady} of {len(counted)} counted steps did not run all {workload.batch_size} requests"
        )
    if preempted := offline.engine.stats().preemptions:
        faults.append(f"{preempted} requests were preempted, and their prompts computed")
    replayed = offline.built.runner.routing.replayed
    if replayed is not None and replayed.doubt is not None:
        faults.append(replayed.doubt)
    drafts = offline.built.runner.facts.speculation
    return DecodeReport(
        origin=origin(),
        subject=offline.subject,
        excluded=offline.excluded,
        settings={**msgspec.to_builtins(workload), **settings_of(config)},
        seed=config.seed,
        workload=workload,
        drafts=0 if drafts is None else drafts.depth(workload.batch_size),
        falsified_by=config.falsifies,
        steps=counted,
        balance=balance(offline.built, first=1 + workload.warm_up, end=1 + workload.warm_up + len(counted)),
        replayed=None if replayed is None else dict(replayed.worked_out),
        faults=tuple(faults),
        complete=len(counted) == workload.steps,
    )


def engine_for(config: EngineConfig, model: ModelConfig, workload: Workload) -> EngineConfig:
    """``config`` with filled caches, and with limits and memory for ``workload``: every request has blocks of its own."""
    drafts = config.speculative
    width = 1 + (0 if drafts is None else drafts.num_speculative_tokens or model.dspark_block_size)
    # two steps are in flight when the last counted one returns, and no request may have ended by then
    longest = workload.context + (1 + workload.warm_up + workload.steps + 3) * width + 1
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"{workload.warm_up} + {workload.steps} steps of up to {width} tokens behind --context {workload.context} make "
            f"{longest} tokens; the model's positions end at {model.max_position_embeddings}"
        )
    config = msgspec.structs.replace(
        config,
        fill_cache=True,
        enable_prefix_caching=False,
        max_num_seqs=workload.batch_size,
        max_num_batched_tokens=workload.batch_size * width,
        max_model_len=longest,
    )
    groups, size = CacheGroups.of(model, drafts=drafts is not None), config.block_size
    plenty = plan_cache(model, msgspec.structs.replace(config, kv_cache_memory_bytes=1 << 50))
    windows = plenty.live_window_blocks * plenty.window_block_bytes
    blocks = workload.batch_size * -(-longest // size) * size * groups.global_bytes_per_pair // 2
    return msgspec.structs.replace(
        config, kv_cache_memory_bytes=max(blocks, windows) + windows + plenty.tail_bytes
    )


def requests_of(workload: Workload, *, vocabulary: int, seed: int, limit: EngineConfig) -> list[Request]:
    """Random prompts that differ in their last tokens, so that neither drafts nor routers see the same row everywhere."""
    chance = random.Random(seed)
    assert limit.max_model_len is not None
    params = SamplingParams(
        max_tokens=limit.max_model_len - workload.context, temperature=workload.temperature, ignore_eos=True
    )
    own = min(TAIL, workload.context)
    common = tuple(chance.choices(range(vocabulary), k=workload.context - own))
    return [
        Request(
            id=f"decode-{number}", prompt=(*common, *chance.choices(range(vocabulary), k=own)), params=params
        )
        for number in range(workload.batch_size)
    ]
