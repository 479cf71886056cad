"""One captured CUDA graph: replayed for timing, and asked what it is made of.

A kernel that was launched with the programmatic-serialization attribute has a programmatic edge from its predecessor in the
graph; counting these is how one knows who launches how (spec/serving.md E3, NVIDIA's cuGraphGetEdges). Knows no model.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

PROGRAMMATIC = 1  # CUgraphDependencyType
KERNEL = 0  # CUgraphNodeType


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """Kernel nodes, dependencies between nodes, and how many of these are programmatic."""

    kernels: int
    edges: int
    programmatic: int


class _EdgeData(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class CapturedGraph:
    """What ``work`` launches on the current stream, as one graph; it runs once before, so that a capture compiles nothing."""

    def __init__(self, work: Callable[[], object]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().synchronize()
        self._work = work  # the graph holds addresses: what ``work`` closes over must live as long
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph):
            work()
        self._graph.instantiate()

    def replay(self) -> None:
        self._graph.replay()

    def facts(self) -> GraphFacts:
        """Count nodes and edges through the driver."""
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(self._graph.raw_cuda_graph())
        count = ctypes.c_size_t()
        _check(driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)))
        edges = count.value
        sources, targets = (ctypes.c_void_p * edges)(), (ctypes.c_void_p * edges)()
        data = (_EdgeData * edges)()
        if edges:
            _check(driver.cuGraphGetEdges_v2(handle, sources, targets, data, ctypes.byref(count)))
        _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
        nodes = (ctypes.c_void_p * count.value)()
        _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
        return GraphFacts(
            kernels=sum(_kind(driver, node) == KERNEL for node in nodes),
            edges=edges,
            programmatic=sum(edge.type == PROGRAMMATIC for edge in data),
        )


def _kind(driver: ctypes.CDLL, node: int | None) -> int:
    kind = ctypes.c_int(-1)
    _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
    return kind.value


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused to describe a graph: error {status}")
