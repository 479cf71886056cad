"""One training step of the draft: the frozen target's forward, drafts at random anchors, losses, Muon and AdamW.

The target runs at tier N2 from its stored weights and is never changed. Its forward gives features, the distributions to
imitate and the next iteration of the sampled text (``train.rollout``). On CUDA a step is one captured graph a shape.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from flashstep.config.model import ModelConfig
from oracle import dspark
from oracle import model as oracle
from oracle.dspark import Anchors
from oracle.model import Functions
from train.draft_parameters import draft_kinds, start_from_backbone
from train.functions import QUANTISED, Compile, compile_quantisers, compiled, plain, quantised_functions
from train.optimiser import Adam, Muon
from train.parameters import ADAM, ADAM_FAST, MUON, Parameters
from train.rollout import Texts, advance
from train.step import BIAS_RATE, RATE_ADAM, RATE_FAST, RATE_MUON, TokenMapView, keep_frequencies

CONFIDENCE_WEIGHT = 0.3
STATISTICS = ("divergence", "acceptance", "confidence", "length", "used", "settled")


def frozen(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The target's weights on the device, bf16 but for what is stored as fp32 (bf16 holds every other value exactly)."""
    wide = (".hc_", ".attn_sink", ".bias")
    return {
        name: (weight if any(part in name for part in wide) else weight.bfloat16()).to(device)
        for name, weight in weights.items()
    }


class Blocks(NamedTuple):
    """Anchors of a batch: ``rows`` int64 [M, K] into the flattened [B x T], ``used`` bool [M, K] places that count."""

    anchors: Anchors
    rows: Tensor
    used: Tensor


def pick(allowed_BT: Tensor, taught_BT: Tensor, ids_BT: Tensor, *, count: int, block: int) -> Blocks:
    """``count`` random anchors in each row of tokens; a place counts while its own row and all before it are taught."""
    batch, total = ids_BT.shape
    lot = torch.rand(ids_BT.shape, device=ids_BT.device) + allowed_BT
    position = lot.topk(count, dim=-1).indices
    chosen = allowed_BT.gather(1, position)
    sequence = torch.arange(batch, device=ids_BT.device)[:, None].expand(batch, count)
    position = position.clamp(min=1)
    steps = torch.arange(block, device=ids_BT.device)
    rows = (sequence * total + position).unsqueeze(-1) + steps
    inside = position.unsqueeze(-1) + steps < total
    rows = torch.where(inside, rows, 0).flatten(0, 1)
    good = taught_BT.flatten()[rows] & inside.flatten(0, 1) & chosen.flatten()[:, None]
    anchors = Anchors(
        sequence=sequence.flatten(), position=position.flatten(), token=ids_BT.gather(1, position).flatten()
    )
    return Blocks(anchors, rows, good.long().cumprod(-1).bool())


def draft_loss(logits: Tensor, confidence: Tensor, target: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the used places of KL(target, draft) + (1 - sum min(p, q)) + 0.3 BCE(confidence, sum min(p, q)).

    Logits [N, V], confidence [N] (before the sigmoid) and ``used`` [N], fp32; also the acceptances [N] and the three terms.
    """
    wanted = target.log_softmax(-1)
    given = logits.log_softmax(-1)
    p, q = wanted.exp(), given.exp()
    divergence = (p * (wanted - given)).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    label = accepted.detach().clamp(0, 1)
    sure = F.binary_cross_entropy_with_logits(confidence, label, reduction="none")
    weight = used / used.sum().clamp(min=1)
    total = ((divergence + 1 - accepted + CONFIDENCE_WEIGHT * sure) * weight).sum()
    terms = torch.stack([(t * weight).sum() for t in (divergence, label, sure)])
    return total, torch.cat((terms.detach(), label))


class DraftTrainer:
    """The frozen target, the draft's masters and optimisers, and the step."""

    def __init__(
        self,
        config: ModelConfig,
        target: Mapping[str, Tensor],
        token_map: Tensor,
        *,
        seed: int,
        device: torch.device,
        compile_: Compile | None,
    ) -> None:
        self.config, self.device = config, device
        keep_frequencies(device)
        self.target = frozen(target, device)
        self.parameters = p = Parameters(config, seed=seed, device=device, table=draft_kinds(config))
        start_from_backbone(p, self.target)
        self.token_map = TokenMapView(token_map, device)
        self.functions: Functions = plain()
        self.draft_functions: Functions = plain()
        self.loss_terms = draft_loss
        if compile_ is not None:
            compile_quantisers(compile_)
            router = msgspec.structs.replace(
                config,
                n_routed_experts=config.dspark_n_routed_experts,
                num_experts_per_tok=config.dspark_num_experts_per_tok,
            )
            flex = device.type == "cuda"
            self.draft_functions = quantised_functions(compiled(router, compile_, flex=False))
            self.functions = quantised_functions(compiled(config, compile_, flex=flex))
            self.loss_terms = compile_(draft_loss)
        self.rates = [torch.zeros((), device=device) for _ in range(3)]
        self.muon_keys = p.keys(MUON)
        self.muon = Muon([p.matrices(k, p.stacks[k].detach()) for k in self.muon_keys], rate=self.rates[0])
        self.adam = [
            Adam([p.stacks[k].detach() for k in p.keys(group)], rate=rate)
            for group, rate in ((ADAM, self.rates[1]), (ADAM_FAST, self.rates[2]))
        ]
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Texts, tuple[Tensor, Tensor]]] = {}
        self.warm: dict[tuple[int, ...], int] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

    def set_rate(self, share: float) -> None:
        """Set the three learning rates to ``share`` of the backbone's full values."""
        for rate, full in zip(self.rates, (RATE_MUON, RATE_ADAM, RATE_FAST), strict=True):
            rate.fill_(share * full)

    @torch.no_grad()
    def target_forward(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """(logits fp32 [B, T, V], features [B, T, G]) of the frozen target at N2."""
        trace: oracle.Trace = {}
        out = oracle.forward(
            self.config,
            self.target,
            ids,
            numerics=QUANTISED,
            token_map=self.token_map,  # ty: ignore[invalid-argument-type] - see TokenMapView
            documents_BT=documents,
            options=oracle.Options(functions=self.functions),
            trace=trace,
        )
        assert out.logits_BTV is not None
        return out.logits_BTV, dspark.features(self.config, trace, numerics=QUANTISED)

    def weights(self) -> dict[str, Tensor]:
        """The target's and the draft's weights by name, the draft's as they will be stored (straight-through)."""
        return self.target | self.parameters.named(self.parameters.values(quantised=True))

    def step(self, texts: Texts, *, count: int) -> tuple[Tensor, Tensor]:
        """One update with ``count`` anchors in each row of tokens: (statistics, ids of the next iteration)."""
        c = self.config
        logits, features = self.target_forward(texts.ids, texts.documents)
        following, settled, ended = advance(texts, logits)
        taught = texts.taught & ~ended & (settled | texts.fresh)
        same = F.pad(texts.documents[:, 1:] == texts.documents[:, :-1], (1, 0))
        allowed = taught & same & F.pad(texts.taught[:, :-1], (1, 0))
        blocks = pick(allowed, taught, texts.ids, count=count, block=c.dspark_block_size)
        weights = self.weights()
        options = dspark.Options(functions=self.draft_functions)
        block = dspark.draft(
            c, weights, features, blocks.anchors, numerics=QUANTISED, documents_BT=texts.documents,
            options=options,
        )  # fmt: skip
        previous = texts.ids.flatten()[blocks.rows]
        drafted, confidence = dspark.markov(c, weights, block, previous, numerics=QUANTISED)
        wanted = logits.flatten(0, 1)[blocks.rows.flatten()]
        total, terms = self.loss_terms(
            drafted.flatten(0, 1), confidence.flatten(), wanted, blocks.used.flatten().float()
        )
        self._update(total)
        self._balance(block.routes)
        statistics = torch.cat((terms[:3], _length(terms[3:], blocks.used), _shares(texts, blocks, settled)))
        return statistics, following

    def _update(self, total: Tensor) -> None:
        p = self.parameters
        keys = [key for key, stack in p.stacks.items() if stack.requires_grad]
        found = torch.autograd.grad(total, [p.stacks[key] for key in keys])
        gradients = dict(zip(keys, found, strict=True))
        self.muon.step([p.matrices(k, gradients[k]) for k in self.muon_keys])
        for adam, group in zip(self.adam, (ADAM, ADAM_FAST), strict=True):
            adam.step([gradients[k] for k in p.keys(group)])

    @torch.no_grad()
    def _balance(self, routes: tuple[Tensor, ...]) -> None:
        """Move the router biases against the load."""
        experts = torch.arange(self.config.dspark_n_routed_experts, device=self.device)
        chosen = torch.stack([ids.flatten() for ids in routes])
        load = (chosen.unsqueeze(-1) == experts).float().mean(1)
        self.parameters.stacks["ffn.gate.bias"].add_(
            BIAS_RATE * torch.sign(load.mean(1, keepdim=True) - load)
        )

    def run(self, texts: Texts, *, count: int, graphs: bool) -> Tensor:
        """One update, which also rewrites ``texts.ids`` in place; by the shape's graph, captured on its third step."""
        if not graphs:
            statistics, following = self.step(texts, count=count)
            texts.ids.copy_(following)
            texts.fresh.fill_(False)
            return statistics
        shape = (*texts.ids.shape, count)
        assert self.stream is not None
        if shape in self.graphs:
            graph, static, (statistics, following) = self.graphs[shape]
            for ours, theirs in zip(static, texts, strict=True):
                ours.copy_(theirs, non_blocking=True)
            graph.replay()
            statistics = statistics.clone()
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.warm[shape] = self.warm.get(shape, 0) + 1
                statistics, following = self.step(texts, count=count)
            torch.cuda.current_stream().wait_stream(self.stream)
            if self.warm[shape] >= 3:
                self._capture(texts, shape, count)
        texts.ids.copy_(following)
        texts.fresh.fill_(False)
        return statistics

    def _capture(self, texts: Texts, shape: tuple[int, ...], count: int) -> None:
        static = Texts(*(t.clone() for t in texts))
        torch.cuda.synchronize()  # noqa: TID251 - before a capture; the trainer is no serving code
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed"):
            outputs = self.step(static, count=count)
        self.graphs[shape] = (graph, static, outputs)


def _length(accepted: Tensor, used: Tensor) -> Tensor:
    """[1]: one plus the expected accepted drafts of the wholly used blocks."""
    whole = used.all(-1).float()
    run = accepted.view(used.shape).cumprod(-1).sum(-1)
    return (1 + (run * whole).sum() / whole.sum().clamp(min=1))[None]


def _shares(texts: Texts, blocks: Blocks, settled: Tensor) -> Tensor:
    """[2]: share of the places that count, and of the model's own rows that are settled."""
    own = texts.own.float()
    return torch.stack((blocks.used.float().mean(), (settled * own).sum() / own.sum().clamp(min=1)))
