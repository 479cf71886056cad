"""EngineConfig -> Runner: the only composition of the lower half (configuration, token map, weights, memory, model, kernels).

Everything that can be refused is looked at before anything is allocated or computed, and refused together: one ``ConfigError``
with all reasons. Nothing below this file reads an EngineConfig.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from flashstep.cache.budget import CacheBudget, plan_cache
from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.config.cache import CacheConfig, HitPolicy
from flashstep.config.engine import ENGRAM_TABLES, LOAD_FORMATS, SCHEDULING_POLICIES, EngineConfig
from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json
from flashstep.config.model import ModelConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation, speculation
from flashstep.engram.hash import EngramHash
from flashstep.engram.table import MMAP, EngramTable
from flashstep.engram.token_map import TokenMap
from flashstep.kernels import Ops, choose_ops
from flashstep.kernels.device import memory_bytes, pick_device
from flashstep.model.transformer import Transformer
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.costs import measure
from flashstep.runner.facts import RunnerFacts
from flashstep.runner.histories import Slots
from flashstep.runner.replay import may_trim
from flashstep.runner.runner import ModelRunner
from flashstep.sampling.constraint import Vocabulary
from flashstep.speculate.depth import CostTable
from flashstep.speculate.dspark import Proposer
from flashstep.telemetry.log import Log
from flashstep.weights.load import Loaded, Progress, dummy_weights, load_weights

DUMMY = "dummy"
log = Log("runner.build")


def build_runner(config: EngineConfig, *, progress: Progress | None = None) -> ModelRunner:
    """A runner that is ready for its first plan; ``progress`` hears how far loading has come."""
    model = ModelConfig.read(config.model)
    reasons = _option_problems(config)
    device = torch.device("cpu")
    with _refusing(reasons):
        device = pick_device(config.device)
    token_map: TokenMap | None = None
    budget: CacheBudget | None = None
    ops: Ops | None = None
    loaded: Loaded | None = None
    tables: dict[int, EngramTable] = {}
    eos_token_ids: tuple[int, ...] = ()
    speculates: Speculation | None = None
    with _refusing(reasons):
        speculates = None if config.speculative is None else speculation(config.speculative, model)
    with _refusing(reasons):
        token_map = read_token_map(config.model, model)
    with _refusing(reasons):
        eos_token_ids = _eos_token_ids(config.model, model)
    with _refusing(reasons):
        EngramHash(model)
    with _refusing(reasons):
        budget = plan_cache(model, config)
        _check_memory(budget, max_num_seqs=config.max_num_seqs, device=device)
    with _refusing(reasons):
        ops = choose_ops(device, kernels=config.kernels)
    if not _option_problems(config):
        with _refusing(reasons):
            loaded = _load(config, model, progress=progress)
            tables = {
                layer: EngramTable.place(
                    planes.values_RD, planes.scales_RG, where=config.engram_table, device=device
                )
                for layer, planes in loaded.engram.items()
            }
    if reasons:
        raise ConfigError(str(config.model), reasons)
    assert token_map is not None and budget is not None and ops is not None and loaded is not None
    facts = _facts(
        config,
        model,
        budget=budget,
        eos_token_ids=eos_token_ids,
        token_map=token_map,
        speculates=speculates,
    )
    pool = CachePool(
        CacheGroups.of(model, drafts=speculates is not None),
        num_blocks=budget.num_blocks,
        num_window_blocks=budget.num_window_blocks,
        block_size=budget.block_size,
        num_slots=config.max_num_seqs,
        device=device,
    )
    weights = {name: weight.to(device) for name, weight in loaded.weights.items()}
    transformer = Transformer(
        model, weights, ops=ops, pool=pool, engram_tables=tables, drafts=speculates is not None
    )
    batches = batch_builder(model, token_map, policy=config.hit_policy, device=device)
    log.info(
        "built",
        model=str(config.model),
        hit_policy=config.hit_policy.value,
        num_blocks=budget.num_blocks,
        num_window_blocks=budget.num_window_blocks,
        max_model_len=budget.max_model_len,
        token_map=token_map.fingerprint,
    )
    draft = (
        None
        if speculates is None
        else _drafting(transformer, facts, speculates, lookback=batches.lookback, device=device)
    )
    return ModelRunner(
        facts,
        model=transformer,
        batches=batches,
        device=device,
        vocabulary=_vocabulary(config.model, model, eos_token_ids=eos_token_ids),
        drafter=None if draft is None else draft.proposer,
        costs=None if draft is None else draft.costs,
    )


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


def _vocabulary(folder: Path, model: ModelConfig, *, eos_token_ids: tuple[int, ...]) -> Vocabulary | None:
    if not _has_tokenizer(folder):
        return None
    return Vocabulary.read(folder, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)


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
            ("engram_table", config.engram_table, ENGRAM_TABLES),
            ("scheduling_policy", config.scheduling_policy, SCHEDULING_POLICIES),
        )
        if value not in allowed
    ]
    if config.load_format == DUMMY and config.engram_table == MMAP:
        problems.append("engram_table is 'mmap', but dummy weights lie in no file; use 'memory'")
    return problems


def _check_memory(budget: CacheBudget, *, max_num_seqs: int, device: torch.device) -> None:
    """Refuse a plan that this machine cannot hold, before the allocator does (or the kernel, much later, by a kill)."""
    tables = max_num_seqs * Slots.bytes_per_slot(budget.max_model_len, block_size=budget.block_size)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    caches, there = (
        (budget.bytes, memory_bytes(device)) if device.type == "cuda" else (budget.bytes + tables, host)
    )
    if caches > there or tables > host:
        reason = (
            f"the caches need {budget.bytes} bytes and the block tables of max_num_seqs {max_num_seqs} requests {tables}; "
            f"this machine has {host}{f', its device {there} free' if there != host else ''}; "
            "lower kv_cache_memory_bytes, num_gpu_blocks_override or max_num_seqs"
        )
        raise ConfigError("the memory plan", [reason])


def _load(config: EngineConfig, model: ModelConfig, *, progress: Progress | None) -> Loaded:
    drafts = config.speculative is not None
    if config.load_format == DUMMY:
        return dummy_weights(model, seed=config.seed, drafts=drafts, progress=progress)
    return load_weights(config.model, model, drafts=drafts, progress=progress)


def _eos_token_ids(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """The EOS ids of config.json and, where there is one, of generation_config.json; all of them end a request."""
    file = folder / "generation_config.json"
    if not file.is_file():
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
        follows_grammars=_has_tokenizer(config.model),
    )
