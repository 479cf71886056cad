"""CSA2 attention (spec/model.md 3): window, compressed and shared KV; the layer roles as four classes of one shape.

``publish`` writes what the rows leave in the caches, ``attend`` reads. They are two calls because bounded replay publishes more
rows than it attends (spec/model.md 9); the query latent, made together with the record, goes from one to the other. A layer
that reads another layer's entries is given that view when it is built.
Suffixes: T rows, D width, L query latent, H heads, C head channels, G output groups.
"""

from typing import Any

from torch import Tensor

from flashstep.cache.pool import CachePool, SourceView, WindowView
from flashstep.config.model import LayerSpec, ModelConfig, Role
from flashstep.kernels import Ops
from flashstep.kernels.mhc import Hidden
from flashstep.model.compressor import Publisher, publisher_of
from flashstep.model.indexer import Indexer, Selection, indexer_of
from flashstep.model.linear import GroupedOutput, Linear8
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rotation, Rows


class Projections:
    """Queries, the key of a window record, and the output projection: what every attention has, the draft's too.

    ``indexes``: the layer chooses entries, by index queries that come of one product with its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        window: WindowView,
        indexes: bool = False,
    ) -> None:
        self._eps = config.rms_norm_eps
        self._latent_weight_L = parameters.plain(f"{prefix}.q_norm.weight")
        self._key_weight_C = parameters.plain(f"{prefix}.kv_norm.weight")
        self._wq_a_wkv = Linear8(parameters, f"{prefix}.wq_a", f"{prefix}.wkv", ops=ops)
        index = (f"{prefix}.indexer.wq_b",) if indexes else ()
        self._wq_b = Linear8(parameters, f"{prefix}.wq_b", *index, ops=ops)
        self._wo_a = GroupedOutput(parameters, f"{prefix}.wo_a", groups=config.o_groups, ops=ops)
        self._wo_b = Linear8(parameters, f"{prefix}.wo_b", ops=ops)
        self._fused = ops.fused
        self._heads, self._channels = config.num_attention_heads, config.head_dim
        self._groups = config.o_groups
        self.sink_H = parameters.plain(f"{prefix}.attn_sink")
        self.window = window
        self.width = config.sliding_window

    def latent_and_record(self, hidden: Hidden, rotation: Rotation, slot_T: Tensor) -> Any:
        """The normed query latent, quantised once for queries and the layer's indexer; each row's window record is stored."""
        return self._fused.latent_and_record(
            self._wq_a_wkv.product(hidden.quantised),
            latent_weight_L=self._latent_weight_L,
            key_weight_C=self._key_weight_C,
            eps=self._eps,
            cos_TP=rotation[0],
            sin_TP=rotation[1],
            planes=self.window.planes,
            slot_T=slot_T,
        )

    def latent_and_key(self, hidden: Hidden, rotation: Rotation) -> tuple[Any, Tensor]:
        """The same latent, and the key bf16 [T, C] itself, normed and rotated."""
        return self._fused.latent_and_key(
            self._wq_a_wkv.product(hidden.quantised),
            latent_weight_L=self._latent_weight_L,
            key_weight_C=self._key_weight_C,
            eps=self._eps,
            cos_TP=rotation[0],
            sin_TP=rotation[1],
        )

    def queries(self, latent: Any) -> tuple[Tensor, Tensor]:
        """Queries [T, H, C], and the index queries [T, X] where the layer has them, before rotation; heads are not normed."""
        product_TX = self._wq_b.product(latent)
        width = self._heads * self._channels
        return product_TX[:, :width].unflatten(1, (self._heads, -1)), product_TX[:, width:]

    def output(self, o_THC: Tensor) -> Tensor:
        """Block-diagonal wo_a over head groups, wo_b -> [T, D]."""
        o_TGI = o_THC.flatten(1).unflatten(1, (self._groups, -1))
        return self._wo_b(self._wo_a(o_TGI).flatten(1))


class WindowAttention:
    """Ratio 0: reads only its own window."""

    def __init__(self, projections: Projections, *, ops: Ops) -> None:
        self._projections = projections
        self._attention = ops.attention

    def publish(self, hidden: Hidden, rows: Rows) -> Any:
        """-> the query latent [T, L], quantised."""
        return self._projections.latent_and_record(hidden, rows.window_rotation, rows.window_slot_T)

    def attend(
        self, hidden: Hidden, latent: Any, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and the selection passed on untouched."""
        p = self._projections
        cos_TP, sin_TP = rows.window_rotation
        q_THC, _ = p.queries(latent)
        o_THC = self._attention.attend_window(
            q_THC,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            window=p.window.planes,
            rows=rows.attention,
            width=p.width,
            sink_H=p.sink_H,
        )
        return p.output(o_THC), selection


class ReuseAttention:
    """Entries and selection of earlier layers, unchanged."""

    def __init__(self, projections: Projections, *, ops: Ops, view: SourceView) -> None:
        self._projections = projections
        self._attention = ops.attention
        self._view = view

    def publish(self, hidden: Hidden, rows: Rows) -> Any:
        """-> the query latent [T, L], quantised."""
        return self._projections.latent_and_record(hidden, rows.compressed_rotation, rows.window_slot_T)

    def attend(
        self, hidden: Hidden, latent: Any, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and the selection passed on untouched."""
        assert selection is not None, "no layer above selected entries"
        q_THC, _ = self._projections.queries(latent)
        return self._attend(q_THC, rows, selection), selection

    def _attend(self, q_THC: Tensor, rows: Rows, selection: Selection) -> Tensor:
        p = self._projections
        cos_TP, sin_TP = rows.compressed_rotation
        o_THC = self._attention.attend_sparse(
            q_THC,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            window=p.window.planes,
            compressed=self._view.compressed,
            rows=rows.attention,
            selected_TK=selection.entries_TK,
            width=p.width,
            sink_H=p.sink_H,
        )
        return p.output(o_THC)


class ReindexAttention(ReuseAttention):
    """Entries of an earlier layer, a selection of its own."""

    def __init__(self, projections: Projections, *, ops: Ops, view: SourceView, indexer: Indexer) -> None:
        super().__init__(projections, ops=ops, view=view)
        self._indexer = indexer

    def attend(
        self, hidden: Hidden, latent: Any, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and this layer's own selection for those below."""
        q_THC, index_TX = self._projections.queries(latent)
        own = self._indexer.select(index_TX, hidden.plain_TD, rows, selection)
        return self._attend(q_THC, rows, own), own


class FullAttention(ReindexAttention):
    """Owns the entries, the index keys and a selection."""

    def __init__(
        self,
        projections: Projections,
        *,
        ops: Ops,
        view: SourceView,
        indexer: Indexer,
        publisher: Publisher,
    ) -> None:
        super().__init__(projections, ops=ops, view=view, indexer=indexer)
        self._publisher = publisher

    def publish(self, hidden: Hidden, rows: Rows) -> Any:
        """-> the query latent [T, L], quantised."""
        self._publisher.publish(hidden.plain_TD, rows)
        return super().publish(hidden, rows)


AnyAttention = WindowAttention | ReuseAttention


def attention_of(
    spec: LayerSpec, config: ModelConfig, parameters: Parameters, *, ops: Ops, pool: CachePool
) -> AnyAttention:
    """The attention that layer ``spec`` is defined to have."""
    prefix = f"layers.{spec.index}.attn"
    projections = Projections(
        config,
        parameters,
        prefix,
        ops=ops,
        window=pool.window(spec.index),
        indexes=spec.role in (Role.FULL, Role.REINDEX),
    )
    if spec.kv_source is None:
        return WindowAttention(projections, ops=ops)
    view = pool.source(spec.kv_source)
    if spec.role is Role.REUSE:
        return ReuseAttention(projections, ops=ops, view=view)
    indexer = indexer_of(spec, config, parameters, f"{prefix}.indexer", ops=ops, view=view)
    if spec.role is Role.REINDEX:
        return ReindexAttention(projections, ops=ops, view=view, indexer=indexer)
    publisher = publisher_of(config, parameters, prefix, ops=ops, view=view)
    return FullAttention(projections, ops=ops, view=view, indexer=indexer, publisher=publisher)
