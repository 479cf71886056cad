"""Trainable weights of the draft: the stacks of ``train.parameters`` for ``mtp.*``, and their start from the backbone.

A draft layer has what a window-only backbone layer has, with fewer experts. Takes a ModelConfig with draft layers; knows
nothing of data or losses.
"""

import dataclasses
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig, Role
from train.parameters import ADAM, ADAM_FAST, BF16, FP8, MUON, Kind, Parameters, kinds, normal

_EXPERT = re.compile(r"\.ffn\.experts\.(\d+)\.")


def draft_kinds(c: ModelConfig) -> dict[str, Kind]:
    """Every stack of the draft, by a short key (spec/model.md 11)."""
    assert c.dspark_n_routed_experts <= c.n_routed_experts, (
        "the draft's experts start as the backbone's first ones"
    )
    pattern = next(s for s in c.layers if s.role is Role.WINDOW and not s.has_engram)
    prefix = f"layers.{pattern.index}."
    stages, d, rank = c.num_nextn_predict_layers, c.hidden_size, c.dspark_markov_rank
    found: dict[str, Kind] = {}
    for key, kind in kinds(c).items():
        own = [name for name in kind.names if name.startswith(prefix) and _kept(name, c)]
        if own:
            names = tuple(name.replace(prefix, f"mtp.{i}.") for i in range(stages) for name in own)
            gate = kind.shape[:1] == (c.n_routed_experts,) and ".gate." in key
            shape = (c.dspark_n_routed_experts, *kind.shape[1:]) if gate else kind.shape
            found[key] = dataclasses.replace(kind, names=names, shape=shape)

    def add(name: str, shape: tuple[int, ...], storage: str, optimiser: str, scale: float) -> None:
        # a matrix by its scale over sqrt(fan-in); a norm's weight is copied from the backbone
        found[name] = Kind((name,), shape, storage, optimiser, normal(scale, shape[-1]))

    last = f"mtp.{stages - 1}"
    add("mtp.0.main_proj.weight", (d, len(c.dspark_target_layer_ids) * d), FP8, MUON, 0.1)
    add("mtp.0.main_norm.weight", (d,), BF16, ADAM, 0)
    add(f"{last}.norm.weight", (d,), BF16, ADAM, 0)
    add(f"{last}.markov_head.embed.weight", (c.vocab_size, rank), BF16, ADAM_FAST, 0.5 * rank**0.5)
    add(f"{last}.markov_head.head.weight", (c.vocab_size, rank), BF16, ADAM, 0.5)
    add(f"{last}.confidence_head.proj.weight", (1, d + rank), BF16, ADAM, 0)
    return found


def _kept(name: str, c: ModelConfig) -> bool:
    expert = _EXPERT.search(name)
    return expert is None or int(expert[1]) < c.dspark_n_routed_experts


def start_from_backbone(parameters: Parameters, target: Mapping[str, Tensor]) -> None:
    """Copy the last backbone layers (their first experts) into the draft layers; the context starts as the mean feature."""
    c = parameters.config
    stages = c.num_nextn_predict_layers
    with torch.no_grad():
        for name, view in parameters.named(parameters.stacks).items():
            head, stage, rest = name.split(".", 2)
            assert head == "mtp"
            source = target.get(f"layers.{c.num_hidden_layers - stages + int(stage)}.{rest}")
            if source is not None:
                view.copy_(source[: view.shape[0]])
        stacks = parameters.stacks
        stacks["mtp.0.main_norm.weight"].fill_(1)
        stacks[f"mtp.{stages - 1}.norm.weight"].copy_(target["norm.weight"][None])
        targets = len(c.dspark_target_layer_ids)
        mean = torch.eye(c.hidden_size).repeat(1, targets) / targets
        stacks["mtp.0.main_proj.weight"].add_(mean.to(stacks["mtp.0.main_proj.weight"].device))
