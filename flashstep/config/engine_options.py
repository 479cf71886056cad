"""What the commands take from the command line for the engine, under vLLM's flag names.

A field is a flag (``max_num_seqs`` is ``--max-num-seqs``), its docstring the help text. ``checked`` refuses a set of values
with every problem in sentences; ``engine`` turns them into an ``EngineConfig``. Knows no parser and no process.
"""

import math
from pathlib import Path
from typing import Literal, Self

import msgspec

from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.engram import EngramOptions
from flashstep.config.errors import ConfigError
from flashstep.config.speculative import SpeculativeOptions

KERNEL_CHOICES = ("auto", "reference")
FORCED_OP = "reference:"


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The engine: memory, limits, caching."""

    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the checkpoint; dummy makes random weights of its config.json"""
    emulate: str | None = None
    """one rank of a larger layout, tpN:RANK or depN:RANK, with dummy weights: for measuring, its texts mean nothing"""
    seed: int = 0
    """makes dummy weights, and the seeds of requests that bring none, repeatable"""
    max_model_len: int | None = None
    """longest prompt + output; the default is the model's limit, or less where the cache holds less"""
    max_num_seqs: int = 256
    """requests that run at once"""
    max_num_batched_tokens: int = 2048
    """tokens one step computes over all requests; a longer prompt is cut into chunks"""
    long_prefill_token_threshold: int = 0
    """most prompt tokens of one request in a step while others wait (0: no limit of its own)"""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """order of waiting requests; priority: smaller numbers first, ties by arrival"""
    block_size: int = 32
    """tokens a cache block covers (even)"""
    kv_cache_memory_bytes: int | None = None
    """bytes shared by all cache groups; the default is 1 GiB, and on a GPU what --gpu-memory-utilization leaves"""
    gpu_memory_utilization: float = 0.92
    """share of the GPU that the engine takes; what is left of it when the model is loaded and was measured holds the caches"""
    num_gpu_blocks_override: int | None = None
    """number of global cache blocks, instead of computing it from the memory"""
    enable_prefix_caching: bool = True
    """reuse the cache blocks of a shared prompt beginning"""
    prefix_hit_policy: HitPolicy = HitPolicy.EXACT
    """exact: a hit gives what a cold run gives; bounded: windows are rebuilt from the last tokens, an approximation"""
    engram_config: str | None = None
    """where the Engram rows live, as a JSON object of vLLM's fields (cpu_offload, use_thp, dp_shared_memory; docs/model.md)"""
    numa_bind: bool = False
    """keep the engine's threads and memory on the NUMA node of its GPU"""
    speculative_config: str | None = None
    """speculation with the checkpoint's draft, as a JSON object of vLLM's fields, '{}' for the defaults (docs/speculation.md)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model runs; auto: a CUDA device where there is one"""
    enforce_eager: bool = False
    """make no CUDA graphs: the engine starts sooner, and every kernel of a step is launched from the host"""
    batch_invariant: bool = False
    """tokens never depend on what runs beside a request: kernels that add in another order for other batch sizes are left out"""
    kernels: str = "auto"
    """auto, reference (plain torch everywhere), or reference:FAMILY.OP to force one op"""
    routing: Literal["real", "uniform", "recorded"] = "real"
    """experts of a row: real, those that the router chooses; uniform, equal loads; recorded, the loads of --expert-loads. All but
    real make every text wrong: for measuring"""
    expert_loads: str | None = None
    """file of expert loads, as --record-expert-loads writes it, to replay with --routing recorded"""
    record_expert_loads: str | None = None
    """write how many rows each expert gets, layer by layer and step by step, to this file (docs/measuring.md)"""
    fill_cache: bool = False
    """admit prompts as if their cache had been handed over, filled with one value: measures decoding without prefill; every text
    is wrong"""
    fill_cache_std: float = 0.0
    """standard deviation of the values that --fill-cache writes (their mean is 0.015)"""

    def problems(self) -> list[str]:
        """Every value that cannot be meant, as sentences that begin with the flag."""
        at_least = {
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "long_prefill_token_threshold": 0,
            "block_size": 2,
            "kv_cache_memory_bytes": 1,
            "num_gpu_blocks_override": 1,
            "seed": 0,
        }
        rules = [
            f"{flag(name)} is {value}; it must be at least {least}"
            for name, least in at_least.items()
            if (value := getattr(self, name)) is not None and value < least
        ]
        if not 0 < self.gpu_memory_utilization <= 1:
            rules.append(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it is a share, above 0 and at most 1"
            )
        if self.block_size % 2:
            rules.append(
                f"--block-size is {self.block_size}; it must be even, or a pair of tokens would straddle two blocks"
            )
        if self.emulate is not None and self.load_format != "dummy":
            rules.append(
                f"--emulate {self.emulate} builds a rank of random weights; say --load-format dummy too"
            )
        for parse in (self.speculative, self.engram):
            try:
                parse()
            except ConfigError as error:
                rules += [f"{error.subject}: {problem}" for problem in error.problems]
        if self.numa_bind and self.device == "cpu":
            rules.append("--numa-bind is set and --device is cpu: there is no GPU to be near to")
        forced = self.kernels.removeprefix(FORCED_OP) if self.kernels.startswith(FORCED_OP) else None
        if forced is None and self.kernels not in KERNEL_CHOICES:
            rules.append(
                f"--kernels is {self.kernels!r}; allowed are auto, reference and reference:FAMILY.OP"
            )
        elif forced is not None and any(name.count(".") != 1 for name in forced.split(",")):
            rules.append(
                f"--kernels is {self.kernels!r}; the op is written FAMILY.OP, as `flashstep kernels` prints it"
            )
        return [*rules, *self._measuring_problems()]

    def _measuring_problems(self) -> list[str]:
        """What only measurements ask for."""
        rules = []
        replayed, recorded = self.expert_loads, self.record_expert_loads
        if (self.routing == "recorded") != (replayed is not None):
            rules.append(
                f"--routing is {self.routing} and --expert-loads is {replayed or 'not given'}; recorded loads need their file, "
                "and a file needs --routing recorded"
            )
        if replayed is not None and not Path(replayed).is_file():
            rules.append(f"--expert-loads is {replayed}; there is no such file")
        if recorded is not None and not Path(recorded).parent.is_dir():
            rules.append(f"--record-expert-loads is {recorded}; there is no folder {Path(recorded).parent}")
        if (
            replayed is not None
            and recorded is not None
            and Path(replayed).resolve() == Path(recorded).resolve()
        ):
            rules.append(f"--expert-loads and --record-expert-loads are one file, {replayed}")
        if not 0 <= self.fill_cache_std < math.inf:
            rules.append(
                f"--fill-cache-std is {self.fill_cache_std}; it must be a finite number of at least 0"
            )
        if self.fill_cache_std and not self.fill_cache:
            rules.append(f"--fill-cache-std is {self.fill_cache_std}, and --fill-cache is not given")
        return rules

    def speculative(self) -> SpeculativeOptions | None:
        """What ``speculative_config`` says; ``ConfigError`` if it cannot be meant."""
        return None if self.speculative_config is None else SpeculativeOptions.parse(self.speculative_config)

    def engram(self) -> EngramOptions:
        """What ``engram_config`` says; ``ConfigError`` if it cannot be meant."""
        return EngramOptions() if self.engram_config is None else EngramOptions.parse(self.engram_config)

    def checked(self) -> Self:
        """Itself, or ``ConfigError`` with all problems."""
        if found := self.problems():
            raise ConfigError("the command line", found)
        return self

    def engine(self, model: Path) -> EngineConfig:
        """The engine's configuration for the checkpoint folder ``model``."""
        return EngineConfig(
            model=model,
            load_format=self.load_format,
            emulate=self.emulate,
            seed=self.seed,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduling_policy=self.scheduling_policy,
            block_size=self.block_size,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_blocks_override=self.num_gpu_blocks_override,
            enable_prefix_caching=self.enable_prefix_caching,
            hit_policy=self.prefix_hit_policy,
            engram=self.engram(),
            numa_bind=self.numa_bind,
            speculative=self.speculative(),
            device=self.device,
            enforce_eager=self.enforce_eager,
            batch_invariant=self.batch_invariant,
            kernels=self.kernels,
            routing=self.routing,
            expert_loads=None if self.expert_loads is None else Path(self.expert_loads),
            record_expert_loads=None if self.record_expert_loads is None else Path(self.record_expert_loads),
            fill_cache=self.fill_cache,
            fill_cache_std=self.fill_cache_std,
        )


def changed_options(options: EngineOptions) -> list[str]:
    """The flags of ``options`` that do not stand at their defaults."""
    return [
        flag(field.name)
        for field in msgspec.structs.fields(options)
        if getattr(options, field.name) != field.default
    ]


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")
