"""One training step: forward of the oracle, loss, gradients, Muon and AdamW, router bias; on CUDA as one captured graph.

Takes packed batches, gives statistics on the device. ``Variant`` is what differs between stages: short or long rows,
dense attention without quantisers, or the model's own selection with all of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flashstep.config.model import ModelConfig
from oracle import model as oracle
from oracle.model import Functions, Options
from train.data import Batch
from train.functions import (
    DENSE,
    QUANTISED,
    Compile,
    compile_quantisers,
    compiled,
    plain,
    quantised_functions,
)
from train.index_loss import IndexLoss, divergence, mass
from train.optimiser import Adam, Muon
from train.parameters import ADAM, ADAM_FAST, MUON, Parameters

RATE_MUON, RATE_ADAM, RATE_FAST = 0.02, 3e-3, 6e-3
BIAS_RATE = 2e-3
INDEX_WEIGHT = 0.5
STATISTICS = ("loss", "index", "accuracy", "load")


class Variant(NamedTuple):
    """Shape and numerics of a step."""

    rows: int
    row: int
    quantised: bool


class TokenMapView:
    """A token map for the oracle that needs no copy or wait on the device while a graph is captured."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        self._host = ids.cpu()
        self._device = ids.to(device)

    def to(self, device: torch.device) -> Tensor:
        assert device.type == self._device.device.type
        return self._device

    def __getitem__(self, token: int) -> int:
        return int(self._host[token])


def keep_frequencies(device: torch.device) -> None:
    """Let the oracle's RoPE frequencies be made once on the device: a copy from the host cannot be captured."""
    original = oracle.rope_frequencies
    if device.type != "cuda" or hasattr(original, "cache_info"):
        return

    @functools.lru_cache(maxsize=8)
    def kept(config: ModelConfig, *, compressed: bool) -> Tensor:
        return original(config, compressed=compressed).to(device)

    oracle.rope_frequencies = kept  # ty: ignore[invalid-assignment]


def sampled_rows(batch: Batch, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [B, count]: rows of the index loss, half of them answer positions (where there are any)."""
    rows = rng.integers(0, batch.ids.shape[1], (batch.ids.shape[0], count))
    for index in range(batch.ids.shape[0]):
        answers = np.flatnonzero(batch.weight[index] == 1)
        if len(answers):
            rows[index, : count // 2] = rng.choice(answers, count // 2)
    return rows


class Inputs(NamedTuple):
    """A batch on the device; static buffers under CUDA graphs."""

    ids: Tensor
    documents: Tensor
    weight: Tensor
    rows: Tensor


def to_device(batch: Batch, rows: np.ndarray, device: torch.device) -> Inputs:
    """Tensors of ``batch`` (pinned and asynchronous on CUDA)."""
    host = [torch.from_numpy(a) for a in (batch.ids, batch.document, batch.weight, rows)]
    if device.type == "cuda":
        host = [t.pin_memory().to(device, non_blocking=True) for t in host]
    return Inputs(*host)


def token_loss(logits: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross entropy of [N, V], and the accuracy on tokens of weight 1."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    answers = (weight == 1).float()
    right = (logits.argmax(-1) == targets).float()
    return (losses * weight).sum() / weight.sum(), (right * answers).sum() / answers.sum().clamp(min=1)


class Trainer:
    """Weights, optimisers and the compiled step."""

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor,
        *,
        seed: int,
        device: torch.device,
        compile_: Compile | None,
    ) -> None:
        self.config, self.device = config, device
        keep_frequencies(device)
        self.parameters = Parameters(config, seed=seed, device=device)
        self.token_map = TokenMapView(token_map, device)
        flex = device.type == "cuda"
        self.functions: Functions = plain() if compile_ is None else compiled(config, compile_, flex=flex)
        self.quantised = self.functions
        self.index_loss = IndexLoss(config)
        self.token_loss: Callable[..., tuple[Tensor, Tensor]] = token_loss
        self.rates = [torch.zeros((), device=device) for _ in range(3)]
        p = self.parameters
        self.muon_keys = p.keys(MUON)
        self.muon = Muon([p.matrices(k, p.stacks[k].detach()) for k in self.muon_keys], rate=self.rates[0])
        self.adam = [
            Adam([p.stacks[k].detach() for k in p.keys(group)], rate=rate)
            for group, rate in ((ADAM, self.rates[1]), (ADAM_FAST, self.rates[2]))
        ]
        if compile_ is not None:
            compile_quantisers(compile_)
            self.quantised = quantised_functions(self.functions)
            self.token_loss = compile_(token_loss)
            self.index_loss = IndexLoss(config, compile_(mass), compile_(divergence))
        self.graphs: dict[Variant, tuple[torch.cuda.CUDAGraph, Inputs, Tensor]] = {}
        self.warm: dict[Variant, int] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

    def set_rate(self, share: float) -> None:
        """Set the three learning rates to ``share`` of their full values."""
        for rate, full in zip(self.rates, (RATE_MUON, RATE_ADAM, RATE_FAST), strict=True):
            rate.fill_(share * full)

    def forward(
        self,
        inputs: Inputs,
        *,
        quantised: bool,
        trace: oracle.Trace | None,
        functions: Functions | None = None,
    ) -> Tensor:
        """Logits [B, T, V]."""
        values = self.parameters.values(quantised=quantised)
        chosen = functions or (self.quantised if quantised else self.functions)
        out = oracle.forward(
            self.config,
            self.parameters.named(values),
            inputs.ids,
            numerics=QUANTISED if quantised else DENSE,
            token_map=self.token_map,  # ty: ignore[invalid-argument-type] - see TokenMapView
            documents_BT=inputs.documents,
            options=Options(functions=chosen, dense=not quantised, detach_indexer=True),
            trace=trace,
        )
        assert out.logits_BTV is not None
        return out.logits_BTV

    def loss(self, inputs: Inputs, *, quantised: bool) -> tuple[Tensor, Tensor, oracle.Trace]:
        """(total loss, statistics [4], trace)."""
        trace: oracle.Trace = {}
        logits = self.forward(inputs, quantised=quantised, trace=trace)
        targets = torch.cat((inputs.ids[:, 1:], inputs.ids[:, :1]), 1)  # the last column has weight 0
        loss, accuracy = self.token_loss(logits.flatten(0, 1), targets.flatten(), inputs.weight.flatten())
        index = self.index_loss(trace, inputs.rows)
        return loss + INDEX_WEIGHT * index, torch.stack((loss, index, accuracy)).detach(), trace

    def step(self, inputs: Inputs, *, quantised: bool) -> Tensor:
        """One update; returns the statistics [4]."""
        p = self.parameters
        total, statistics, trace = self.loss(inputs, quantised=quantised)
        keys = [key for key, stack in p.stacks.items() if stack.requires_grad]
        found = torch.autograd.grad(total, [p.stacks[key] for key in keys])
        gradients = dict(zip(keys, found, strict=True))
        self.muon.step([p.matrices(k, gradients[k]) for k in self.muon_keys])
        for adam, group in zip(self.adam, (ADAM, ADAM_FAST), strict=True):
            adam.step([gradients[k] for k in p.keys(group)])
        return torch.cat((statistics, self._balance(trace)[None]))

    @torch.no_grad()
    def _balance(self, trace: oracle.Trace) -> Tensor:
        """Move the router biases against the load; returns the largest load of an expert over the mean."""
        experts = torch.arange(self.config.n_routed_experts, device=self.device)
        chosen = torch.stack(
            [trace[f"layers.{layer.index}.route_e"].flatten() for layer in self.config.layers]
        )
        load = (chosen.unsqueeze(-1) == experts).float().mean(1)
        self.parameters.stacks["ffn.gate.bias"].add_(
            BIAS_RATE * torch.sign(load.mean(1, keepdim=True) - load)
        )
        return load.max() * self.config.n_routed_experts

    def run(self, variant: Variant, inputs: Inputs, *, graphs: bool) -> Tensor:
        """One update by the variant's graph (captured on its third step), or eagerly."""
        if not graphs or self.device.type != "cuda":
            return self.step(inputs, quantised=variant.quantised)
        if variant in self.graphs:
            graph, static, statistics = self.graphs[variant]
            for target, source in zip(static, inputs, strict=True):
                target.copy_(source, non_blocking=True)
            graph.replay()
            return statistics.clone()
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.warm[variant] = self.warm.get(variant, 0) + 1
            result = self.step(inputs, quantised=variant.quantised)
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.warm[variant] >= 3:
            static = Inputs(*(t.clone() for t in inputs))
            torch.cuda.synchronize()  # noqa: TID251 - before a capture; the trainer is no serving code
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed"):
                statistics = self.step(static, quantised=variant.quantised)
            self.graphs[variant] = (graph, static, statistics)
        return result


def mode_of(variant: Variant) -> str:
    """A short name for logs."""
    return f"{variant.rows}x{variant.row} {'n2' if variant.quantised else 'dense'}"


def replace_numerics(functions: Functions, **changes: object) -> Functions:
    """``functions`` with some fields replaced (comparison runs)."""
    return dataclasses.replace(functions, **changes)
