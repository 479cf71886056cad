"""``flashstep bench forward``: steps of given shapes through the built engine, timed, taken apart, held against their floors.

Takes an ``EngineConfig`` and cases; gives ``results.Report``. A decoding case is the runner's own decode step, a graph that is
launched once a step; a piece of a prompt runs op by op. On a CPU there are the times of whole steps only.
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from flashstep.bench import floors
from flashstep.bench.accounts import DRAFT, MARKOV, MHC, TARGET, WITHOUT_FLOOR, part_of
from flashstep.bench.cases import Case, fill
from flashstep.bench.offline import balance
from flashstep.bench.origin import origin
from flashstep.bench.results import KernelTime, Measured, Memory, PartTime, Report
from flashstep.bench.timeline import (
    Launched,
    annotate,
    attributed,
    in_phase,
    launched,
    own_times,
    phase,
    steady,
    trace_host,
)
from flashstep.cache.budget import plan_cache
from flashstep.cache.groups import CacheGroups
from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.kernels import Ops, choose_ops
from flashstep.kernels.device import pick_device
from flashstep.parallel.rank import Rank
from flashstep.runner.build import Built, build
from flashstep.runner.decode import Form
from flashstep.runner.memory import loaded_bytes

WARM_UPS = 3
LONGEST_S, FEWEST = 3.0, 3  # a case is timed for no longer, but so often, unless fewer are wanted
IN_A_ROW = 3  # replays under the profiler, of which the middle one counts
ROOM = 1024  # tokens that a request may grow by while its steps are replayed
FLOOR_NAMES = {"mHC weights": MHC, "mHC streams": MHC}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A case made ready: ``run`` launches it once; ``apart`` the same, op by op and in ranges."""

    run: Callable[[], object]
    apart: Callable[[], object]
    is_graph: bool


def measure(
    config: EngineConfig,
    cases: Sequence[str],
    *,
    shapes: ModelConfig | None = None,
    repeats: int = 30,
    trace: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Build what ``config`` says and time ``cases``; ``trace`` is written of one step of the last case.

    Ctrl-C ends it early, with the cases that are done.
    """
    whole = shapes or ModelConfig.read(config.model)
    wanted = [Case.parse(case, draft_block=whole.dspark_block_size) for case in cases]
    config = engine_for(config, whole, wanted)
    device = pick_device(config.device)
    chosen = choose_ops(device, kernels=config.kernels, batch_invariant=config.batch_invariant)
    ops = annotate(chosen)  # it may compile: that is no loading
    started = time.perf_counter()
    built = build(config, shapes=shapes, ops=ops)
    load_s = time.perf_counter() - started
    progress(f"loaded in {load_s:.1f} s, {built.measured_bytes / 1e9:.1f} GB")
    peak_loading_bytes = _peak_bytes(device)
    bench = Bench(built, config=config, whole=whole, ops=ops, device=device, repeats=repeats)
    measured: list[Measured] = []
    faults: list[str] = []
    try:
        for case in wanted:
            measured.append(bench.measure(case, trace=trace if case is wanted[-1] else None))
            progress(f"{case.name}: {measured[-1].us:,.0f} us")
    except KeyboardInterrupt:
        faults.append(f"it was interrupted behind {len(measured)} of {len(wanted)} cases")
    return Report(
        origin=origin(),
        model=str(config.model),
        layout="whole" if config.emulate is None else built.layout.name,
        excluded=Rank(built.layout).excluded,
        memory=Memory(
            planned_bytes=loaded_bytes(built.memory),
            loaded_bytes=built.measured_bytes,
            peak_loading_bytes=peak_loading_bytes,
            peak_bytes=_peak_bytes(device),
            load_s=load_s,
        ),
        cases=tuple(measured),
        faults=tuple(faults),
    )


def _peak_bytes(device: torch.device) -> int:
    """The most that tensors have taken since this was last asked; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def engine_for(config: EngineConfig, model: ModelConfig, cases: Sequence[Case]) -> EngineConfig:
    """``config`` with the limits and the memory that ``cases`` need; nothing is cached between them."""
    drafts = config.speculative or (SpeculativeOptions() if any(case.drafts for case in cases) else None)
    longest = max(case.context + case.rows for case in cases) + ROOM
    config = msgspec.structs.replace(
        config,
        speculative=drafts,
        enable_prefix_caching=False,
        hit_policy=HitPolicy.BOUNDED,
        max_num_seqs=max(case.requests for case in cases),
        max_num_batched_tokens=max(case.requests * case.rows for case in cases),
        max_model_len=min(longest, model.max_position_embeddings),
        enforce_eager=True,  # only what is measured is captured, here
    )
    return msgspec.structs.replace(config, kv_cache_memory_bytes=_cache_bytes(config, model, cases))


def _cache_bytes(config: EngineConfig, model: ModelConfig, cases: Sequence[Case]) -> int:
    """What the caches need so that every request of every case has blocks of its own."""
    groups, size = CacheGroups.of(model, drafts=config.speculative is not None), config.block_size
    plenty = plan_cache(model, msgspec.structs.replace(config, kv_cache_memory_bytes=1 << 50))
    held = max(case.window_blocks(block_size=size, window=model.sliding_window) for case in cases)
    windows = max(plenty.live_window_blocks, held) * plenty.window_block_bytes
    longest = max(case.requests * (case.context + case.rows + ROOM) for case in cases)
    blocks = max(-(-longest // size) + config.max_num_seqs, -(-(config.max_model_len or 0) // size))
    return max(blocks * size * groups.global_bytes_per_pair // 2, windows) + windows + plenty.tail_bytes


class Bench:
    """A built runner whose steps are timed."""

    def __init__(
        self,
        built: Built,
        *,
        config: EngineConfig,
        whole: ModelConfig,
        ops: Ops,
        device: torch.device,
        repeats: int,
    ) -> None:
        self._built = built
        self._config = config
        self._whole = whole
        self._view = built.config
        self._device = device
        self._repeats = repeats
        self._chosen: list[Tensor] | None = None  # experts of each layer, while somebody listens
        self._listen(ops)
        fill(built.pool, built.config)
        draft = built.model.draft
        if draft is not None:
            in_phase(draft, "propose", DRAFT)
            in_phase(draft, "markov", MARKOV)

    def _listen(self, ops: Ops) -> None:
        """Hear which experts the router has chosen."""
        experts = ops.moe._loaded["experts"]

        def heard(*inputs: Any, **options: Any) -> Any:
            if self._chosen is not None:
                self._chosen.append(options["experts_TK"].clone())
            return experts(*inputs, **options)

        ops.moe._loaded["experts"] = heard

    @torch.inference_mode()
    def measure(self, case: Case, *, trace: Path | None = None) -> Measured:
        """Time ``case``, and on a GPU take it apart."""
        work = self._decoding(case) if case.decodes else self._prompt(case)
        for _ in range(WARM_UPS):
            work.run()
        on_gpu = self._device.type == "cuda"
        timed = _device_times if on_gpu else _host_times
        (one,) = timed(work.run, 1)
        samples = timed(work.run, min(self._repeats, max(int(1e6 * LONGEST_S / one), FEWEST)))
        known = self._floors(case) if on_gpu else {}
        touched = self._touched(work)
        balanced = self._balancedness(work, case)
        measured = Measured(
            case=case.name,
            rows=case.requests * case.rows,
            graph=work.is_graph,
            samples_us=tuple(samples),
            floor_us=sum(known.values()) or None,
            touched_experts=touched,
            expected_experts=floors.Sizes(self._whole, self._built.layout).touched(case.requests * case.rows),
            balancedness=balanced,
        )
        if not on_gpu:
            if trace is not None:
                trace_host(work.run, trace)
            return measured
        apart = launched(work.apart, trace=None if work.is_graph else trace)
        if not work.is_graph:
            return self._taken_apart(measured, apart, known)

        def in_a_row() -> None:
            for _ in range(IN_A_ROW):
                work.run()

        kernels, until = steady(launched(in_a_row, trace=trace), repeats=IN_A_ROW)
        return self._taken_apart(measured, attributed(kernels, apart), known, until=until)

    def _touched(self, work: Work) -> float:
        """Local experts that a step touches, the mean of the target's layers."""
        self._chosen = []
        work.apart()
        counts = [chosen_TK.unique().numel() for chosen_TK in self._chosen[: self._view.num_hidden_layers]]
        self._chosen = None
        return sum(counts) / len(counts)

    def _balancedness(self, work: Work, case: Case) -> float | None:
        """Of the target's layers over the layout's parts, where loads are recorded: one step more is run, and written down."""
        routing = self._built.runner.routing
        if routing.recorded is None:
            return None
        work.run()
        routing.record(routing.counted(drafted=bool(case.drafts)))
        found = balance(self._built, first=-1)
        return None if found is None else found.mean

    def _decoding(self, case: Case) -> Work:
        step, pool = self._built.runner.decode, self._built.pool
        if step is None:
            raise ValueError(
                "adaptive or drawn drafts are not decoded by graphs; leave --speculative-config at '{}'"
            )
        width = 1 + step.state.drafts
        if case.rows > width:
            raise ValueError(
                f"the case {case.name} has {case.rows} rows a request; a step of decoding has up to {width}"
            )
        form = Form(requests=case.requests, verified=case.rows - 1, proposed=case.drafts or 0)
        step.occupy(
            case.requests,
            context=case.context,
            num_blocks=pool.num_blocks,
            num_window_blocks=pool.num_window_blocks,
            window=self._view.sliding_window,
            vocabulary=self._view.vocab_size,
        )
        step.address(case.requests)
        self._built.runner.assign_experts(form)
        step.capture_form(form)

        def apart() -> None:
            with phase(TARGET):
                step.run(form)

        return Work(run=lambda: step.launch(form), apart=apart, is_graph=self._device.type == "cuda")

    def _prompt(self, case: Case) -> Work:
        batch = case.forward_batch(self._view, self._built.pool)
        tail = None if batch.tail_rows is None else len(batch.tail_rows)
        self._built.runner.routing.assign(len(batch.input_ids_T), tail_rows=tail)

        def run() -> None:
            with phase(TARGET):
                self._built.model.forward(batch)

        return Work(run=run, apart=run, is_graph=False)

    def _floors(self, case: Case) -> dict[str, float]:
        """us by part."""
        if case.decodes:
            parts = floors.of_step(
                self._whole,
                self._built.layout,
                requests=case.requests,
                rows=case.rows,
                context=case.context,
                drafts=bool(case.drafts),
            )
        else:
            parts = floors.prefill(
                self._whole,
                self._built.layout,
                rows=case.requests * case.rows,
                context=case.context,
                ends=not case.continues,
            )
        known: dict[str, float] = defaultdict(float)
        for part in parts:
            known[FLOOR_NAMES.get(part.name, part.name)] += 1e6 * part.seconds
        return known

    def _taken_apart(
        self,
        measured: Measured,
        kernels: Sequence[Launched],
        known: dict[str, float],
        *,
        until: float | None = None,
    ) -> Measured:
        own, idle = own_times(kernels, until=until)
        by_part: dict[str, float] = defaultdict(float)
        launches: Counter[str] = Counter()
        by_kernel: dict[tuple[str, str], list[float]] = defaultdict(list)
        for kernel, us in zip(kernels, own, strict=True):
            part = part_of(kernel.account, self._view)
            by_part[part] += us
            launches[part] += 1
            by_kernel[kernel.name, kernel.account].append(us)
        names = [*known, *(name for name in WITHOUT_FLOOR if name in by_part)]
        names += [name for name in by_part if name not in names]
        return msgspec.structs.replace(
            measured,
            parts=tuple(
                PartTime(name=name, us=by_part.get(name), floor_us=known.get(name), launches=launches[name])
                for name in names
            ),
            kernels=tuple(
                KernelTime(
                    name=name, account=account, part=part_of(account, self._view), calls=len(us), us=sum(us)
                )
                for (name, account), us in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))
            ),
            launches=len(kernels),
            idle_share=idle / (idle + sum(own)) if kernels else None,
        )


def _device_times(run: Callable[[], object], repeats: int) -> list[float]:
    """us of each of ``repeats`` runs, back to back."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [1e3 * first.elapsed_time(second) for first, second in itertools.pairwise(marks)]


def _host_times(run: Callable[[], object], repeats: int) -> list[float]:
    """us of each of ``repeats`` runs on a CPU."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - started))
    return times
