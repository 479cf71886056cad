"""From a profiler's events to kernels with accounts: nesting, order, overlap."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashstep.bench import timeline
from flashstep.bench.timeline import Launched, attributed, own_times, steady


def event(category: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    return {
        "cat": category,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {} if correlation is None else {"correlation": correlation},
    }


def test_a_kernel_is_accounted_to_the_ranges_around_its_launch() -> None:
    events = [
        event("user_annotation", "op:target", 0, 100),
        event("user_annotation", "op:gemm.lin8[8x4]", 10, 20),
        event("cuda_runtime", "launch", 15, 1, correlation=7),
        event("user_annotation", "op:draft", 50, 30),
        event("user_annotation", "op:moe.route", 55, 5),
        event("cuda_driver", "launch", 56, 1, correlation=8),
        event("cuda_runtime", "launch", 40, 1, correlation=9),
        event("cuda_runtime", "launch", 110, 1, correlation=10),
        event("kernel", "first", 200, 5, correlation=7),
        event("kernel", "third", 220, 5, correlation=8),
        event("gpu_memset", "second", 210, 5, correlation=9),
        event("kernel", "fourth", 230, 5, correlation=10),
        event("kernel", "of a graph", 240, 5),
    ]
    found = timeline._launched(events)
    assert [(kernel.name, kernel.account) for kernel in found] == [
        ("first", "target/gemm.lin8[8x4]"),
        ("second", "target"),
        ("third", "draft/moe.route"),
        ("fourth", ""),
        ("of a graph", ""),
    ]
    assert (found[0].start, found[0].end, found[-1].start) == (0, 5, 40)


def test_a_replay_takes_the_accounts_of_the_same_kernels_in_order() -> None:
    eager = [Launched(name="a", start=0, end=1, account="x"), Launched(name="a", start=1, end=2, account="y")]
    replayed = [replace(kernel, account="") for kernel in eager]
    assert [kernel.account for kernel in attributed(replayed, eager)] == ["x", "y"]
    assert [kernel.account for kernel in attributed(replayed, eager[:1])] == ["", ""]


def test_time_that_two_kernels_share_counts_once_and_gaps_are_idle() -> None:
    kernels = [
        Launched(name=n, start=s, end=e)
        for n, s, e in (("a", 0, 10), ("b", 8, 12), ("c", 9, 11), ("d", 15, 16))
    ]
    times, idle = own_times(kernels)
    assert times == [10, 2, 0, 1] and idle == 3
    assert own_times([]) == ([], 0.0)
    assert own_times(kernels, until=20)[1] == 7


def test_of_runs_in_a_row_the_middle_one_counts() -> None:
    runs = [Launched(name=n, start=s, end=s + 1) for s, n in enumerate("abcabcabc")]
    chosen, until = steady(runs, repeats=3)
    assert [kernel.start for kernel in chosen] == [3, 4, 5] and until == 6
    for changed in (runs[:-1], [*runs[:4], runs[3], *runs[5:]]):
        assert steady(changed, repeats=3) == (changed, None)


def test_ranges_name_the_op_and_the_weight() -> None:
    from flashstep.kernels import choose_ops

    ops = timeline.annotate(choose_ops(torch.device("cpu")))
    weight = ops.gemm.prepare_bf16(
        torch.zeros(3, 32, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        ops.gemm.linf(torch.zeros(1, 32, dtype=torch.bfloat16), weight)
    assert "op:gemm.linf[5x32]" in {item.key for item in profiler.key_averages()}


@pytest.mark.gpu
def test_a_captured_graph_launches_what_its_eager_twin_does() -> None:
    device = torch.device("cuda")
    x = torch.randn(64, 64, device=device)

    def work() -> None:
        with timeline.phase("target"):
            x.mul_(1.01).add_(0.1)
            torch.relu_(x)

    work()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found = attributed(timeline.launched(graph.replay), timeline.launched(work))
    assert len(found) == 3 and {kernel.account for kernel in found} == {"target"}
