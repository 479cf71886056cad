"""Where a step's time goes: the kernels of a replayed graph, each with the op that launched it.

A graph's replay tells names and times, and nothing of who launched what; the same work run op by op tells who. Both launch the
same kernels in the same order, so that the n-th of one is the n-th of the other. Takes callables; knows no model.
"""

import contextlib
import dataclasses
import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flashstep.kernels import Ops

OP = "op:"  # how our ranges' names begin
PREPARE = "prepare_"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """One kernel (or copy) of a step: when it ran, in us from the step's first, and on whose account ("phase/op")."""

    name: str
    start: float
    end: float
    account: str = ""


def annotate(ops: Ops) -> Ops:
    """``ops`` whose calls carry a range with the op's name and, where it takes a prepared weight, that weight's shape."""
    shapes: dict[int, str] = {}
    for field in dataclasses.fields(ops):
        family = getattr(ops, field.name)
        for name, call in family._loaded.items():
            wrap = _remembering if name.startswith(PREPARE) else _ranged
            family._loaded[name] = wrap(call, f"{field.name}.{name}", shapes)
    return ops


@contextlib.contextmanager
def phase(name: str) -> Generator[None]:
    """What runs inside is accounted to ``name``."""
    with record_function(OP + name):
        yield


def in_phase(owner: object, method: str, name: str) -> None:
    """Account what ``owner``'s ``method`` runs to ``name``, inside whatever phase it is called in."""
    call = getattr(owner, method)

    def run(*inputs: Any, **options: Any) -> Any:
        with phase(name):
            return call(*inputs, **options)

    setattr(owner, method, run)


def launched(work: Callable[[], object], *, trace: Path | None = None) -> list[Launched]:
    """The kernels that ``work`` launches, in the order of their start; with accounts where ``work`` has ranges."""
    torch.cuda.current_stream().synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.current_stream().synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return _launched(events)


def trace_host(work: Callable[[], object], file: Path) -> None:
    """Write what ``work`` does on a CPU, op by op, as a Chrome/Perfetto trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    profiler.export_chrome_trace(str(file))


def _launched(events: list[dict[str, Any]]) -> list[Launched]:
    kernels = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    ranges = _Ranges([e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(OP)])
    begin = kernels[0]["ts"] if kernels else 0.0
    found = []
    for event in kernels:
        launch = launches.get(event["args"].get("correlation"))
        account = ranges.at(launch["ts"]) if launch is not None else ""
        start = event["ts"] - begin
        found.append(Launched(name=event["name"], start=start, end=start + event["dur"], account=account))
    return found


class _Ranges:
    """Nested ranges of one thread, by time."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
        self._starts = [e["ts"] for e in self._events]

    def at(self, ts: float) -> str:
        """The outermost and the innermost range around ``ts``."""
        last = bisect_right(self._starts, ts)
        around = []
        for event in reversed(self._events[:last]):  # a step's phases are few and long: the walk ends early
            if event["ts"] + event["dur"] >= ts:
                around.append(event["name"].removeprefix(OP))
                if "." not in event["name"]:
                    break
        return "/".join(reversed(around))


def attributed(replayed: list[Launched], eager: list[Launched]) -> list[Launched]:
    """``replayed`` with the accounts of ``eager``, by order; without them where the two differ in number."""
    if len(replayed) != len(eager):
        return replayed
    return [
        dataclasses.replace(kernel, account=source.account)
        for kernel, source in zip(replayed, eager, strict=True)
    ]


def steady(kernels: Sequence[Launched], *, repeats: int) -> tuple[list[Launched], float | None]:
    """Of ``repeats`` runs of the same kernels the middle one's, and when the one behind it starts; all of them if they differ."""
    count, rest = divmod(len(kernels), repeats)
    middle = repeats // 2 * count
    chosen = list(kernels[middle : middle + count])
    if rest or repeats < 3 or [k.name for k in chosen] != [k.name for k in kernels[:count]]:
        return list(kernels), None
    return chosen, kernels[middle + count].start


def own_times(kernels: Sequence[Launched], *, until: float | None = None) -> tuple[list[float], float]:
    """The us that each kernel alone keeps the device busy behind those before it, and the us when nothing runs.

    ``until``: idle time counts up to there, else to the last kernel's end.
    """
    times, idle, reached = [], 0.0, kernels[0].start if kernels else 0.0
    for kernel in kernels:
        idle += max(kernel.start - reached, 0.0)
        times.append(max(kernel.end - max(kernel.start, reached), 0.0))
        reached = max(reached, kernel.end)
    return times, idle + (0.0 if until is None else max(until - reached, 0.0))


def _remembering(call: Callable[..., Any], _op: str, shapes: dict[int, str]) -> Callable[..., Any]:
    def prepare(*weights: Any, **options: Any) -> Any:
        prepared = call(*weights, **options)
        given = [weight.shape for weight in weights if hasattr(weight, "shape")]
        if given:
            shapes[id(prepared)] = "x".join(
                map(str, (*given[0][:-2], sum(s[-2] for s in given), given[0][-1]))
            )
        return prepared

    return prepare


def _ranged(call: Callable[..., Any], op: str, shapes: dict[int, str]) -> Callable[..., Any]:
    def run(*inputs: Any, **options: Any) -> Any:
        known = (shapes.get(id(value)) for value in inputs if not isinstance(value, int | float))
        shape = next((shape for shape in known if shape), None)
        with record_function(f"{OP}{op}" + (f"[{shape}]" if shape else "")):
            return call(*inputs, **options)

    return run
