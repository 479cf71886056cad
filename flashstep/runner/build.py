"""EngineConfig -> Runner: the only composition of the lower half (configuration, token map, weights, memory, model, kernels).

Everything that can be refused is looked at before anything is allocated or computed, and refused together: one ``ConfigError``
with all reasons. Nothing below this file reads an EngineConfig.
"""

import contextlib
import hashlib
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from flashstep.cache.budget import CacheBudget
from flashstep.cache.filled import FilledCache
from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.config.cache import CacheConfig, HitPolicy
from flashstep.config.engine import LOAD_FORMATS, ROUTINGS, SCHEDULING_POLICIES, EngineConfig
from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json
from flashstep.config.model import ModelConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation, speculation
from flashstep.engram.hash import EngramHash, smaller_tables
from flashstep.engram.table import EngramTable
from flashstep.engram.token_map import TokenMap
from flashstep.kernels import Ops, choices, choose_ops
from flashstep.kernels.device import memory_bytes, pick_device
from flashstep.kernels.registry import Choice
from flashstep.model.transformer import Transformer
from flashstep.parallel.layout import WHOLE, Layout
from flashstep.parallel.rank import Rank
from flashstep.runner import numa
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.costs import measure
from flashstep.runner.decode import DecodeStep
from flashstep.runner.facts import RunnerFacts
from flashstep.runner.measure import SMALL_POOL, expected, measured
from flashstep.runner.measure import measures as measures_cache
from flashstep.runner.memory import (
    Machine,
    MemoryPlan,
    allocated_bytes,
    check_memory,
    loaded_bytes,
    plan_memory,
)
from flashstep.runner.replay import may_trim
from flashstep.runner.routing import Measuring, routing_of
from flashstep.runner.routing import problems as routing_problems
from flashstep.runner.runner import ModelRunner, decodes_by_itself
from flashstep.runner.state import DecodeState
from flashstep.sampling.constraint import Vocabulary
from flashstep.speculate.depth import CostTable
from flashstep.speculate.dspark import Proposer
from flashstep.telemetry.log import Log
from flashstep.weights.generated import GeneratedWeights
from flashstep.weights.load import Loaded, OnDevice, Progress, check_weights, dummy_weights, load_weights

AUTO, DUMMY = "auto", "dummy"
EMULATED_ENGRAM_ROWS = 4_000_000  # a layer: the released tables have 384 million
log = Log("runner.build")


class Built(NamedTuple):
    """A runner, and what it is made of, for those who look inside (benches); ``config`` is the built rank's view."""

    runner: ModelRunner
    config: ModelConfig
    layout: Layout
    model: Transformer
    pool: CachePool
    memory: MemoryPlan
    measured_bytes: int  # of the device, behind loading


def build_runner(config: EngineConfig, *, progress: Progress | None = None) -> ModelRunner:
    """A runner that is ready for its first plan; ``progress`` hears how far loading has come."""
    return build(config, progress=progress).runner


def build(
    config: EngineConfig,
    *,
    shapes: ModelConfig | None = None,
    ops: Ops | None = None,
    progress: Progress | None = None,
) -> Built:
    """What ``build_runner`` gives, with its parts.

    ``shapes`` stands for the configuration in ``config.model``, which need not exist then (dummy weights); ``ops`` for the
    kernels that ``config.kernels`` would choose.
    """
    whole = shapes or ModelConfig.read(config.model)
    layout, model = rank_of(config, whole)
    found = _examine(config, whole, model, layout=layout, ops=ops)
    config, memory = found.config, found.memory
    device, token_map, speculates, budget = found.device, found.token_map, found.speculates, memory.budget
    measures = found.measures
    before_bytes = allocated_bytes(device)
    loaded = _load(config, model, layout=layout, device=device, progress=progress)
    pool = CachePool(
        CacheGroups.of(model, drafts=speculates is not None),
        num_blocks=min(budget.num_blocks, SMALL_POOL) if measures else budget.num_blocks,
        num_window_blocks=min(budget.num_window_blocks, SMALL_POOL) if measures else budget.num_window_blocks,
        block_size=budget.block_size,
        num_slots=config.max_num_seqs,
        device=device,
    )
    routing = routing_of(config, model, layout=layout, device=device)
    transformer = Transformer(
        model,
        OnDevice(loaded.weights, device),
        ops=found.ops,
        pool=pool,
        engram_tables=_tables(config, loaded, device=device),
        drafts=speculates is not None,
        rank=Rank(layout, device=device),
        routing=routing.taps,
    )
    batches = batch_builder(model, token_map, policy=config.hit_policy, device=device)
    if measures:
        config = measured(model, config, transformer, pool, batches=batches)
        memory = plan_memory(model, config, layout=layout, on_gpu=True)
        budget = memory.budget
        pool.resize(budget.num_blocks, budget.num_window_blocks)
    vocabulary = _vocabulary(config, model, eos_token_ids=found.eos_token_ids)
    facts = _facts(
        config,
        whole,
        follows_grammars=vocabulary is not None,
        budget=budget,
        eos_token_ids=found.eos_token_ids,
        token_map=token_map,
        speculates=speculates,
    )
    measured_bytes = allocated_bytes(device) - before_bytes
    log.info(
        "built",
        model=str(config.model),
        hit_policy=config.hit_policy.value,
        num_blocks=budget.num_blocks,
        num_window_blocks=budget.num_window_blocks,
        max_model_len=budget.max_model_len,
        token_map=token_map.fingerprint,
        planned_bytes=loaded_bytes(memory),
        measured_bytes=measured_bytes,
        batch_invariant=device.type == "cpu" or config.batch_invariant,
        **({} if config.emulate is None else {"emulates": layout.name, "excluded": Rank(layout).excluded}),
    )
    draft = (
        None
        if speculates is None
        else _drafting(transformer, facts, speculates, lookback=batches.lookback, device=device)
    )
    filled = FilledCache(pool, std=config.fill_cache_std, seed=config.seed) if config.fill_cache else None
    runner = ModelRunner(
        facts,
        model=transformer,
        batches=batches,
        vocabulary=vocabulary,
        drafter=None if draft is None else draft.proposer,
        costs=None if draft is None else draft.costs,
        decode=_decode(transformer, facts, batches, ops=found.ops, device=device),
        measuring=Measuring(routing, filled),
    )
    if runner.decode is not None and device.type == "cuda":
        _capture(runner.decode, config, device=device)
    return Built(
        runner=runner,
        config=model,
        layout=layout,
        model=transformer,
        pool=pool,
        memory=memory,
        measured_bytes=measured_bytes,
    )


def _tables(config: EngineConfig, loaded: Loaded, *, device: torch.device) -> dict[int, EngramTable]:
    """The Engram tables, where ``config`` wants them; a shared one is named after the checkpoint that it is of.

    ``loaded`` loses its planes: no table is there twice for long.
    """
    index = max(config.model.glob("*.safetensors*"), default=config.model)
    source = f"{index.resolve()} {index.stat().st_mtime_ns}" if index.exists() else str(config.seed)
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    tables = {}
    for layer in sorted(loaded.engram):
        planes = loaded.engram.pop(layer)
        tables[layer] = EngramTable.place(
            planes.values_RD,
            planes.scales_RG,
            config.engram.place(device.type),
            device=device,
            huge=config.engram.use_thp,
            node=numa.node_of(device),
            name=f"engram-{layer}-{digest}",
        )
    return tables


class _Examined(NamedTuple):
    """What is known before anything is loaded; of caches that are to be measured ``config`` has what arithmetic says."""

    config: EngineConfig
    measures: bool
    device: torch.device
    ops: Ops
    token_map: TokenMap
    eos_token_ids: tuple[int, ...]
    speculates: Speculation | None
    memory: MemoryPlan


def _examine(
    config: EngineConfig, whole: ModelConfig, model: ModelConfig, *, layout: Layout, ops: Ops | None
) -> _Examined:
    """Look at everything that can be refused; one ``ConfigError`` with all reasons."""
    reasons = _option_problems(config)
    device = torch.device("cpu")
    with _refusing(reasons):
        device = pick_device(config.device)
        reasons += config.engram.problems_on(device.type, has_files=config.load_format != DUMMY)
        if config.numa_bind:
            numa.bind(device)
    measures = False
    token_map: TokenMap | None = None
    memory: MemoryPlan | None = None
    eos_token_ids: tuple[int, ...] = ()
    speculates: Speculation | None = None
    with _refusing(reasons):
        speculates = None if config.speculative is None else speculation(config.speculative, model)
    with _refusing(reasons):
        token_map = _token_map(config, whole, model)
    with _refusing(reasons):
        eos_token_ids = _eos_token_ids(config, model)
    with _refusing(reasons):
        EngramHash(model)
    with _refusing(reasons):
        measures = measures_cache(config, on_gpu=device.type == "cuda")
        if measures:
            config = expected(model, config, layout=layout, free_bytes=memory_bytes(device))
        memory = plan_memory(model, config, layout=layout, on_gpu=device.type == "cuda")
        check_memory(memory, model, config, layout=layout, machine=Machine.here(device))
    with _refusing(reasons):
        ops = ops or choose_ops(device, kernels=config.kernels, batch_invariant=config.batch_invariant)
    with _refusing(reasons):
        reasons += routing_problems(config, model)
    if config.load_format == AUTO:
        with _refusing(reasons):
            check_weights(config.model, model)
    if reasons:
        raise ConfigError(str(config.model), reasons)
    assert token_map is not None and memory is not None and ops is not None
    return _Examined(config, measures, device, ops, token_map, eos_token_ids, speculates, memory)


def rank_of(config: EngineConfig, whole: ModelConfig) -> tuple[Layout, ModelConfig]:
    """The layout that ``config`` emulates a rank of, and that rank's view of ``whole``; without, the whole model itself."""
    if config.emulate is None:
        return WHOLE, whole
    layout = Layout.parse(config.emulate)
    return layout, smaller_tables(layout.view(whole), rows=EMULATED_ENGRAM_ROWS)


def batch_builder(
    model: ModelConfig, token_map: TokenMap, *, policy: HitPolicy, device: torch.device
) -> BatchBuilder:
    """The batch builder of ``model`` under ``policy``."""
    trims = policy is HitPolicy.BOUNDED and may_trim(model)
    return BatchBuilder(
        token_map=token_map.array,
        pad=token_map.ids[model.engram_pad_token_id] if model.engram_layer_ids else 0,
        lookback=max(model.engram_max_ngram_size, 1),
        trim_window=model.sliding_window if trims else None,
        device=device,
    )


def read_token_map(folder: Path, model: ModelConfig) -> TokenMap:
    """The token map of the checkpoint's tokenizer; a model without Engram may come without one."""
    if not model.engram_layer_ids and not _has_tokenizer(folder):
        return TokenMap.of(np.zeros(model.vocab_size, dtype=np.int64).tolist())
    return TokenMap.read(folder, model)


def _token_map(config: EngineConfig, whole: ModelConfig, model: ModelConfig) -> TokenMap:
    """The checkpoint's; an emulated rank, whose texts mean nothing, folds the ids of the whole vocabulary."""
    if config.emulate is None:
        return read_token_map(config.model, model)
    return TokenMap.of([token % model.engram_compressed_vocab_size for token in range(whole.vocab_size)])


def _decode(
    model: Transformer, facts: RunnerFacts, batches: BatchBuilder, *, ops: Ops, device: torch.device
) -> DecodeStep | None:
    """Steps of decoding that the device takes by itself, if these facts allow them."""
    if not decodes_by_itself(facts.speculation):
        log.info(
            "every step waits for its result: only point masses in the plan's number are decided on the device"
        )
        return None
    state = DecodeState(
        num_slots=facts.scheduler.max_num_seqs,
        max_model_len=facts.max_model_len,
        block_size=facts.cache.block_size,
        drafts=facts.speculation.num_tokens if facts.speculation else 0,
        batches=batches,
    )
    token_map_V = torch.from_numpy(batches.token_map).to(device)
    return DecodeStep(model, state=state, ops=ops, token_map_V=token_map_V, speculation=facts.speculation)


def waits_for_host(chosen: Mapping[str, Choice]) -> list[str]:
    """The ops of which the plain reference was chosen."""
    return sorted(op for op, choice in chosen.items() if choice.chosen.is_reference)


def _capture(decode: DecodeStep, config: EngineConfig, *, device: torch.device) -> None:
    """CUDA graphs of every number of requests, unless the user does not want them or an op cannot be captured."""
    chosen = choices(device, kernels=config.kernels, batch_invariant=config.batch_invariant)
    waiting = waits_for_host(chosen)
    if config.enforce_eager or waiting:
        reason = (
            "--enforce-eager"
            if config.enforce_eager
            else f"plain references wait for the host: {', '.join(waiting)}"
        )
        log.info("no CUDA graphs", reason=reason)
        return
    began, before = time.perf_counter(), memory_bytes(device)
    decode.capture_all(progress=lambda done, of: log.info("capturing CUDA graphs", done=done, of=of))
    log.info(
        "CUDA graphs captured",
        graphs=len(decode.forms),
        seconds=round(time.perf_counter() - began, 1),
        bytes=before - memory_bytes(device),
    )


class _Drafting(NamedTuple):
    proposer: Proposer
    costs: CostTable | None


def _drafting(
    model: Transformer, facts: RunnerFacts, speculates: Speculation, *, lookback: int, device: torch.device
) -> _Drafting:
    draft = model.draft
    assert draft is not None
    proposer = Proposer(draft, method=speculates.draft_sample_method)
    if not speculates.adaptive:
        return _Drafting(proposer, None)
    with torch.inference_mode():
        costs = measure(
            model,
            draft,
            lookback=lookback,
            drafts=speculates.num_tokens,
            max_num_seqs=facts.scheduler.max_num_seqs,
            cache=facts.cache,
            device=device,
        )
    curves = {
        f"{name}_ms": {rows: round(1e3 * s, 2) for rows, s in zip(curve.rows, curve.seconds, strict=True)}
        for name, curve in (("verify", costs.verify), ("draft", costs.draft))
    }
    log.info("costs measured", **curves)
    return _Drafting(proposer, costs)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _vocabulary(
    config: EngineConfig, model: ModelConfig, *, eos_token_ids: tuple[int, ...]
) -> Vocabulary | None:
    if not _has_tokenizer(config.model) or config.emulate is not None:
        return None
    vocabulary = Vocabulary.read(config.model, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)
    try:
        vocabulary.prepare()
    except ValueError as error:
        log.warning("constraints are refused: llguidance cannot read tokenizer.json", error=str(error))
        return None
    return vocabulary


@contextlib.contextmanager
def _refusing(reasons: list[str]) -> Generator[None]:
    """Note what a stage refuses, and go on to the next, so that the user hears of everything at once."""
    try:
        yield
    except ConfigError as error:
        reasons += [f"{error.subject}: {problem}" for problem in error.problems]
    except ValueError as error:
        reasons.append(str(error))


def _option_problems(config: EngineConfig) -> list[str]:
    problems = [
        f"{name} is {value!r}; allowed are {', '.join(allowed)}"
        for name, value, allowed in (
            ("load_format", config.load_format, LOAD_FORMATS),
            ("scheduling_policy", config.scheduling_policy, SCHEDULING_POLICIES),
            ("routing", config.routing, ROUTINGS),
        )
        if value not in allowed
    ]
    if config.emulate is not None and config.load_format != DUMMY:
        problems.append("emulate builds one rank of random weights; say load_format 'dummy' too")
    return problems


def _load(
    config: EngineConfig,
    model: ModelConfig,
    *,
    layout: Layout,
    device: torch.device,
    progress: Progress | None,
) -> Loaded:
    drafts = config.speculative is not None
    if config.load_format == DUMMY and (device.type == "cuda" or config.emulate is not None):
        generated = GeneratedWeights(
            model, device=device, seed=config.seed, layout=layout, drafts=drafts, progress=progress
        )
        return Loaded(
            weights=generated, engram={layer: generated.engram(layer) for layer in model.engram_layer_ids}
        )
    if config.load_format == DUMMY:
        return dummy_weights(model, seed=config.seed, drafts=drafts, progress=progress)
    return load_weights(config.model, model, drafts=drafts, progress=progress)


def _eos_token_ids(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """The EOS ids of config.json and, where there is one, of generation_config.json; all of them end a request."""
    file = config.model / "generation_config.json"
    if not file.is_file() or config.emulate is not None:
        return (model.eos_token_id,)
    data = read_json(file)
    given = data.get("eos_token_id", []) if isinstance(data, dict) else None
    try:
        ids = msgspec.convert(given if isinstance(given, list) else [given], list[int])
    except msgspec.ValidationError:
        ids = [-1]
    if not all(0 <= token < model.vocab_size for token in ids):
        reason = f"eos_token_id is {given!r}; it must be a token id in 0..{model.vocab_size - 1}, or a list of them"
        raise ConfigError(str(file), [reason])
    return tuple(dict.fromkeys((model.eos_token_id, *ids)))


def _facts(
    config: EngineConfig,
    model: ModelConfig,
    *,
    budget: CacheBudget,
    eos_token_ids: tuple[int, ...],
    token_map: TokenMap,
    speculates: Speculation | None,
    follows_grammars: bool,
) -> RunnerFacts:
    return RunnerFacts(
        scheduler=SchedulerConfig(
            max_model_len=budget.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
        ),
        cache=CacheConfig(
            block_size=budget.block_size,
            num_blocks=budget.num_blocks,
            num_window_blocks=budget.num_window_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            hit_policy=config.hit_policy,
        ),
        sliding_window=model.sliding_window,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids,
        token_map_fingerprint=token_map.fingerprint,
        speculation=speculates,
        follows_grammars=follows_grammars,
        fills_cache=config.fill_cache,
        falsifies=config.falsifies,
    )
