"""Parameters from stored tensors: a checkpoint on disk, or random ones of the same names.

Takes a folder or a seed and the configuration; gives tensors and QuantTensors by our name (``names``), and the Engram planes
apart, since they may stay where they are. A checkpoint is compared with the configuration as a whole, and refused as a whole,
before any of its data is read; no absent tensor is ever made up. Engram planes are not searched for NaN: they may be mapped.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.quant import e8m0
from flashstep.quant.tensor import FP8_BLOCK, MXFP4, QuantTensor
from flashstep.weights.dummy import DummyWeights
from flashstep.weights.names import Kind, Parameter, engram_table_name, is_vision, parameters, stored_tensors
from flashstep.weights.reader import INDEX, Checkpoint, CheckpointError

Weights = Mapping[str, Tensor | QuantTensor]
Fetch = Callable[[str], Tensor]  # stored name -> stored tensor
Progress = Callable[[int, int], None]  # parameters done, of how many
E4M3_NAN = 0x7F  # all bits but the sign


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramPlanes:
    """One layer's table as stored: E4M3 values [rows, C] and E8M0 scales [rows, C / 32]; perhaps memory maps."""

    values_RD: Tensor
    scales_RG: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """``weights`` by our name, owned or made when asked for; ``engram`` planes by layer, as the source gave them."""

    weights: Weights
    engram: dict[int, EngramPlanes]


class OnDevice(Weights):
    """``weights`` on ``device``, each moved there when it is asked for, so that no weight is there in two forms for long."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        return self._weights[name].to(self._device)


def check_weights(folder: Path, config: ModelConfig) -> Checkpoint:
    """The checkpoint in ``folder``, none of whose data has been read; ``CheckpointError`` if it is not as ``config`` needs it."""
    checkpoint = Checkpoint(folder)
    problems = [*checkpoint.problems, *misfits(checkpoint, config)]
    if problems:
        raise CheckpointError(str(folder), problems)
    return checkpoint


def load_weights(
    folder: Path, config: ModelConfig, *, drafts: bool = False, progress: Progress | None = None
) -> Loaded:
    """The checkpoint in ``folder``; ``CheckpointError`` lists everything that is not as ``config`` needs it.

    The drafter's tensors (mtp.*) are checked always and loaded if ``drafts``; vision tensors are skipped.
    """
    checkpoint = check_weights(folder, config)
    loaded = _assemble(checkpoint.tensor, config, drafts=drafts, progress=progress)
    poisoned = [
        f"{name} in {folder} holds NaN: the file is damaged, or was written by a run that diverged"
        for name, weight in loaded.weights.items()
        if _holds_nan(weight)
    ]
    if poisoned:
        raise CheckpointError(str(folder), poisoned)
    return loaded


def dummy_weights(
    config: ModelConfig, *, seed: int, drafts: bool = False, progress: Progress | None = None
) -> Loaded:
    """Random weights of ``config``: the same as ``load_weights`` gives for what ``dummy.write_dummy`` writes."""
    return _assemble(DummyWeights(config, seed).tensor, config, drafts=drafts, progress=progress)


def misfits(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """What ``checkpoint`` lacks, has too much, or has in another shape or dtype than ``config`` needs."""
    wanted = stored_tensors(config)
    problems = []
    for name, stored in wanted.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            if name not in checkpoint.reported:
                problems.append(f"{name} is missing: neither {INDEX} nor any shard holds it")
            continue
        if entry.shape != stored.shape:
            problems.append(
                f"{name} in {entry.file} has shape {list(entry.shape)}; expected {list(stored.shape)}"
            )
        if entry.dtype != stored.dtype:
            problems.append(f"{name} in {entry.file} has dtype {entry.dtype}; expected {stored.dtype}")
    problems += [
        f"{name} in {entry.file} is unexpected: no tensor of this configuration has that name"
        for name, entry in sorted(checkpoint.entries.items())
        if name not in wanted and not is_vision(name)
    ]
    return problems


def _assemble(fetch: Fetch, config: ModelConfig, *, drafts: bool, progress: Progress | None) -> Loaded:
    chosen = [p for p in parameters(config).values() if drafts or not p.is_draft]
    weights: dict[str, Tensor | QuantTensor] = {}
    planes: dict[str, EngramPlanes] = {}
    for done, parameter in enumerate(chosen, start=1):
        if parameter.kind is Kind.ENGRAM_TABLE:
            values, scales = (fetch(stored.name) for stored in parameter.stored)
            planes[parameter.name] = EngramPlanes(values_RD=values, scales_RG=scales)
        else:
            weights[parameter.name] = _parameter(parameter, fetch)
        if progress is not None:
            progress(done, len(chosen))
    return Loaded(
        weights=weights, engram={layer: planes[engram_table_name(layer)] for layer in config.engram_layer_ids}
    )


def _parameter(parameter: Parameter, fetch: Fetch) -> Tensor | QuantTensor:
    """The parameter in memory of its own: nothing of ours may change when a file does."""
    if parameter.kind is Kind.FP4_EXPERTS:
        return _experts(parameter, fetch)
    tensors = [fetch(stored.name).clone() for stored in parameter.stored]
    if parameter.kind is not Kind.FP8_BLOCK:
        return tensors[0]
    return QuantTensor(
        data=tensors[0], scale=tensors[1].view(torch.uint8), format=FP8_BLOCK, shape=parameter.shape
    )


def _experts(parameter: Parameter, fetch: Fetch) -> QuantTensor:
    """Packed bytes uint8 [E, out, in / 2] and scale bytes uint8 [E, out, in / 32], filled expert by expert."""
    experts = parameter.shape[0]
    stored = parameter.stored
    data = torch.empty(experts, *stored[0].shape, dtype=torch.uint8)
    scale = torch.empty(experts, *stored[1].shape, dtype=torch.uint8)
    for expert in range(experts):
        data[expert] = fetch(stored[2 * expert].name).view(torch.uint8)
        scale[expert] = fetch(stored[2 * expert + 1].name).view(torch.uint8)
    return QuantTensor(data=data, scale=scale, format=MXFP4, shape=parameter.shape)


def _holds_nan(weight: Tensor | QuantTensor) -> bool:
    """A NaN value, or a scale byte that means NaN (E2M1 values cannot be one)."""
    if isinstance(weight, Tensor):
        return bool(weight.isnan().any())
    bad = bool((weight.scale == e8m0.NAN_BYTE).any())
    if weight.format is FP8_BLOCK:
        bad |= bool(((weight.data.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any())
    return bad
