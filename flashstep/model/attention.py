"""CSA2 attention (spec/model.md 3): window, compressed and shared KV; the layer roles as four classes of one shape.

``publish`` writes what the rows leave in the caches, ``attend`` reads. They are two calls because bounded replay publishes more
rows than it attends (spec/model.md 9); the query latent, of one product with the record, goes from one to the other. A layer
that reads another layer's entries is given that view when it is built.
Suffixes: T rows, D width, L query latent, H heads, C head channels, G output groups.
"""

from typing import Any

from torch import Tensor

from flashstep.cache.pool import CachePool, SourceView, WindowView
from flashstep.config.model import LayerSpec, ModelConfig, Role
from flashstep.kernels import Ops
from flashstep.model.compressor import Publisher
from flashstep.model.indexer import AnyIndexer, Selection, indexer_of
from flashstep.model.linear import GroupedOutput, Linear8, Norm
from flashstep.model.parameters import Parameters
from flashstep.model.rope import compressed_frequencies
from flashstep.model.rows import Rotation, Rows


class Projections:
    """Queries, the key of a window record, and the output projection: what every attention has, the draft's too."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, window: WindowView
    ) -> None:
        eps = config.rms_norm_eps
        self._q_norm = Norm(parameters, f"{prefix}.q_norm", eps=eps, ops=ops)
        self._wq_b = Linear8(parameters, f"{prefix}.wq_b", ops=ops)
        self._kv_norm = Norm(parameters, f"{prefix}.kv_norm", eps=eps, ops=ops)
        self._wo_a = GroupedOutput(parameters, f"{prefix}.wo_a", groups=config.o_groups, ops=ops)
        self._wo_b = Linear8(parameters, f"{prefix}.wo_b", ops=ops)
        self._norm_rope, self._cast, self._gemm = ops.norm_rope, ops.cast, ops.gemm
        self._heads, self._groups = config.num_attention_heads, config.o_groups
        self.sink_H = parameters.plain(f"{prefix}.attn_sink")
        self.window = window
        self.width = config.sliding_window

    def key(self, k_TC: Tensor, rotation: Rotation) -> Tensor:
        """wkv's product [T, C] -> key and value in one, normed and rotated."""
        return self._norm_rope.rotate(self._kv_norm(k_TC), *rotation)

    def store(self, k_TC: Tensor, rows: Rows, rotation: Rotation) -> None:
        """Write each row's window record, of wkv's product [T, C]."""
        self._cast.store_mxfp8(self.key(k_TC, rotation), self.window.planes, slot_T=rows.window_slot_T)

    def latent(self, latent_TL: Tensor) -> Any:
        """The normed query latent, quantised once for queries and the layer's indexer."""
        return self._gemm.quantise_input(self._q_norm(latent_TL))

    def queries(self, latent: Any, rotation: Rotation) -> Tensor:
        """Rotated queries [T, H, C]; heads are not normed."""
        return self._norm_rope.rotate(self._wq_b.product(latent).unflatten(1, (self._heads, -1)), *rotation)

    def output(self, o_THC: Tensor, rotation: Rotation) -> Tensor:
        """Inverse rotation, block-diagonal wo_a over head groups, wo_b -> [T, D]."""
        o_THC = self._norm_rope.rotate_inverse(o_THC, *rotation)
        o_TGI = o_THC.flatten(1).unflatten(1, (self._groups, -1))
        return self._wo_b(self._wo_a(o_TGI).flatten(1))


class LayerProjections(Projections):
    """Those of a backbone layer, whose rows' queries and window records come of one product."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, window: WindowView
    ) -> None:
        super().__init__(config, parameters, prefix, ops=ops, window=window)
        self._wq_a_wkv = Linear8(parameters, f"{prefix}.wq_a", f"{prefix}.wkv", ops=ops)
        self._split = (config.q_lora_rank, config.head_dim)

    def store_window(self, x_TD: Tensor, rows: Rows, rotation: Rotation) -> Tensor:
        """Write each row's window record -> query latent [T, L] before its norm."""
        latent_TL, k_TC = self._wq_a_wkv(x_TD).split(self._split, dim=1)
        self.store(k_TC, rows, rotation)
        return latent_TL


class WindowAttention:
    """Ratio 0: reads only its own window."""

    def __init__(self, projections: LayerProjections, *, ops: Ops) -> None:
        self._projections = projections
        self._attention = ops.attention

    def publish(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """-> the query latent [T, L]."""
        return self._projections.store_window(x_TD, rows, rows.window_rotation)

    def attend(
        self, x_TD: Tensor, latent_TL: Tensor, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and the selection passed on untouched."""
        p = self._projections
        q_THC = p.queries(p.latent(latent_TL), rows.window_rotation)
        o_THC = self._attention.attend_window(
            q_THC, window=p.window.planes, rows=rows.attention, width=p.width, sink_H=p.sink_H
        )
        return p.output(o_THC, rows.window_rotation), selection


class ReuseAttention:
    """Entries and selection of earlier layers, unchanged."""

    def __init__(self, projections: LayerProjections, *, ops: Ops, view: SourceView) -> None:
        self._projections = projections
        self._attention = ops.attention
        self._view = view

    def publish(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """-> the query latent [T, L]."""
        return self._projections.store_window(x_TD, rows, rows.compressed_rotation)

    def attend(
        self, x_TD: Tensor, latent_TL: Tensor, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and the selection passed on untouched."""
        assert selection is not None, "no layer above selected entries"
        return self._attend(self._projections.latent(latent_TL), rows, selection), selection

    def _attend(self, latent: Any, rows: Rows, selection: Selection) -> Tensor:
        p = self._projections
        o_THC = self._attention.attend_sparse(
            p.queries(latent, rows.compressed_rotation),
            window=p.window.planes,
            compressed=self._view.compressed,
            rows=rows.attention,
            selected_TK=selection.entries_TK,
            width=p.width,
            sink_H=p.sink_H,
        )
        return p.output(o_THC, rows.compressed_rotation)


class ReindexAttention(ReuseAttention):
    """Entries of an earlier layer, a selection of its own."""

    def __init__(
        self, projections: LayerProjections, *, ops: Ops, view: SourceView, indexer: AnyIndexer
    ) -> None:
        super().__init__(projections, ops=ops, view=view)
        self._indexer = indexer

    def attend(
        self, x_TD: Tensor, latent_TL: Tensor, rows: Rows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D], and this layer's own selection for those below."""
        latent = self._projections.latent(latent_TL)
        own = self._indexer.select(latent, x_TD, rows, selection)
        return self._attend(latent, rows, own), own


class FullAttention(ReindexAttention):
    """Owns the entries, the index keys and a selection."""

    def __init__(
        self,
        projections: LayerProjections,
        *,
        ops: Ops,
        view: SourceView,
        indexer: AnyIndexer,
        publisher: Publisher,
    ) -> None:
        super().__init__(projections, ops=ops, view=view, indexer=indexer)
        self._publisher = publisher

    def publish(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """-> the query latent [T, L]."""
        self._publisher.publish(x_TD, rows)
        return super().publish(x_TD, rows)


AnyAttention = WindowAttention | ReuseAttention


def attention_of(
    spec: LayerSpec, config: ModelConfig, parameters: Parameters, *, ops: Ops, pool: CachePool
) -> AnyAttention:
    """The attention that layer ``spec`` is defined to have."""
    prefix = f"layers.{spec.index}.attn"
    projections = LayerProjections(config, parameters, prefix, ops=ops, window=pool.window(spec.index))
    if spec.kv_source is None:
        return WindowAttention(projections, ops=ops)
    view = pool.source(spec.kv_source)
    if spec.role is Role.REUSE:
        return ReuseAttention(projections, ops=ops, view=view)
    indexer = indexer_of(spec, config, parameters, f"{prefix}.indexer", ops=ops, view=view)
    if spec.role is Role.REINDEX:
        return ReindexAttention(projections, ops=ops, view=view, indexer=indexer)
    frequencies = compressed_frequencies(config).to(pool.device)
    publisher = Publisher(config, parameters, prefix, ops=ops, view=view, frequencies=frequencies)
    return FullAttention(projections, ops=ops, view=view, indexer=indexer, publisher=publisher)
