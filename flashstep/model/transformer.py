"""V4.1 as modules. Start reading here, then ``block``; the draft is ``dspark``.

Takes a ``ForwardBatch``, gives fp32 logits; caches are written on the way through the views that layers were built with.
Knows no request, schedule or checkpoint. Suffixes: T rows, S streams, D width, V vocabulary,
F features of the draft's target layers (others: ``batch``).

Weights come as a mapping by released name (spec/model.md 11), FP8 dense weights as ``QuantTensor`` under ``<name>.weight``, the
experts of a layer stacked as MXFP4 ``QuantTensor`` under ``layers.L.ffn.experts.{w1,w2,w3}``. Engram tables come apart, by layer.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.config.model import ModelConfig
from flashstep.engram.hash import EngramHash
from flashstep.engram.table import EngramTable
from flashstep.kernels import Ops
from flashstep.model.attention import attention_of
from flashstep.model.batch import ForwardBatch
from flashstep.model.block import Block, State
from flashstep.model.dspark import DRAFT, DraftModel
from flashstep.model.embedding import Embedding
from flashstep.model.engram import EngramInjection, Prefetch
from flashstep.model.linear import LinearF
from flashstep.model.mhc import Exit, Streams
from flashstep.model.moe import MoE
from flashstep.model.parameters import Parameters
from flashstep.model.rope import angles_of, compressed_frequencies, window_frequencies
from flashstep.model.routing import Routing
from flashstep.model.rows import Rows, rows_of
from flashstep.parallel.rank import Rank
from flashstep.quant.tensor import QuantTensor

OTHERS = ("vision.", "aligner.", "image_")  # released names that belong to other modules


class Transformer:
    """The text backbone, complete when constructed.

    ``engram_tables`` maps each Engram layer to its rows. With ``drafts`` the draft model is built from the same
    weights: ``draft``, which every forward feeds. ``rank`` says whose part of a layout ``config`` and ``weights`` are (None: the
    whole model); a weight is dropped as soon as it is prepared, if ``weights`` makes it when asked. ``routing``: for measuring.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor | QuantTensor],
        *,
        ops: Ops,
        pool: CachePool,
        engram_tables: Mapping[int, EngramTable],
        drafts: bool = False,
        rank: Rank | None = None,
        routing: Routing | None = None,
    ) -> None:
        parameters = Parameters(weights, rank=rank)
        hashing = EngramHash(config, pool.device) if config.engram_layer_ids else None

        injections: dict[int, EngramInjection] = {}
        if hashing is not None:
            for layer in config.engram_layer_ids:
                table = engram_tables[layer]
                injections[layer] = EngramInjection(
                    config, parameters, layer, ops=ops, hashing=hashing, table=table
                )
        self._routing = routing
        self._prefetch = Prefetch(tuple(injections.values()), pool.device)
        self._ops = ops
        self._block_size = pool.block_size
        self._angles = angles_of(
            window_frequencies(config), compressed_frequencies(config), device=pool.device
        )
        self._last_source = config.last_kv_source
        self._embedding = Embedding(config, parameters)
        self._blocks = [
            Block(
                config,
                parameters,
                f"layers.{spec.index}",
                ops=ops,
                attention=attention_of(spec, config, parameters, ops=ops, pool=pool),
                moe=MoE(
                    config,
                    parameters,
                    f"layers.{spec.index}.ffn",
                    ops=ops,
                    experts_per_token=config.num_experts_per_tok,
                    tap=None if routing is None else partial(routing.target.tap, spec.index),
                ),
                engram=injections.get(spec.index),
                captures=drafts and spec.index in config.dspark_target_layer_ids,
            )
            for spec in config.layers
        ]
        self._exit = Exit(config, parameters, "norm", ops=ops)
        self._head = LinearF(parameters, "head", ops=ops)
        self.draft: DraftModel | None = None
        if drafts:
            self.draft = DraftModel(
                config,
                parameters,
                ops=ops,
                pool=pool,
                embedding=self._embedding,
                head=self._head,
                taps=None if routing is None else routing.draft,
            )
        others = OTHERS if drafts else (*OTHERS, DRAFT)
        strays = [name for name in parameters.left_over() if not name.startswith(others)]
        if strays:
            raise ValueError(
                f"the weights hold {len(strays)} names that the model does not use: {strays[:20]}"
            )

    @property
    def records_loads(self) -> bool:
        """Whether each forward counts the rows of each expert."""
        return self._routing is not None and self._routing.target.counts_LE is not None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the rows of ``batch`` -> fp32 logits [rows, V] of ``batch.logit_rows``, in that order. Waits for nothing."""
        rows = rows_of(batch, angles=self._angles, block_size=self._block_size, ops=self._ops)
        with self._prefetch(rows.lookback_TN):
            return self._run(batch, rows)

    def _run(self, batch: ForwardBatch, rows: Rows) -> Tensor:
        if self._routing is not None:
            self._routing.target.begin(batch.counted_T)
        x_TSD = self._embedding(batch.input_ids_T)
        state = State(streams=x_TSD)
        for layer, block in enumerate(self._blocks):
            cuts = batch.tail_start_R is not None and layer == self._last_source
            if cuts and batch.tail_rows is not None:
                kept, kept_rows = batch.tail_rows, rows.keep(batch.tail_rows)
                tail = block.forward_tail(state, rows, kept=kept, kept_rows=kept_rows)
                if tail is None:
                    return self._head(x_TSD[:0, 0])
                state, rows = tail, kept_rows
            else:
                state = block.forward(state, rows)
            if cuts:
                rows = rows.cut_windows(batch.tail_start_R)
        if self.draft is not None:
            self.draft.remember(torch.cat(state.features, dim=1), rows)
        assert isinstance(state.streams, Streams), "a model has layers"
        _, normed_RD = self._exit(state.streams, batch.logit_rows)
        return self._head(normed_RD)
