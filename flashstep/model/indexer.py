"""The indexer of a layer: which compressed entries each row attends to (spec/model.md 4).

Three kinds, by what the layer is: ``Indexer`` scores everything visible, ``CandidateIndexer`` also names each row's candidate
blocks, ``WithinIndexer`` scores only inside the candidates that an earlier layer named in the same forward. A selection lives
for one forward and travels with the rows; the keys are another layer's where the layer reindexes.
"""

from typing import Any, NamedTuple

from torch import Tensor

from flashstep.cache.pool import SourceView
from flashstep.config.model import LayerSpec, ModelConfig
from flashstep.kernels import Ops
from flashstep.model.linear import LinearB
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rows


class Selection(NamedTuple):
    """What index sources hand down within a forward: entries int32 [T, K], candidate blocks int32 [T, M] or None."""

    entries_TK: Tensor
    candidates_TM: Tensor | None


class Queries:
    """Index queries and head weights of a layer."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops) -> None:
        self._weights_proj = LinearB(parameters, f"{prefix}.weights_proj", ops=ops)
        self._fused = ops.fused
        self._heads = config.index_n_heads

    def __call__(self, index_TX: Tensor, x_TD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Index wq_b's product [T, H * K] and hidden rows -> bf16 [T, H, K] quantised queries, bf16 [T, H] head weights."""
        q_THK = index_TX.unflatten(1, (self._heads, -1))
        return self._fused.rotate_round(q_THK, *rows.compressed_rotation), self._weights_proj(x_TD)


class Indexer:
    """Scores every visible entry: Full layers up to the candidate source, and Reindex layers without one."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, view: SourceView
    ) -> None:
        self._queries = Queries(config, parameters, prefix, ops=ops)
        self._indexer = ops.indexer
        self._view = view
        self._count = config.index_topk
        self._blocks = config.candidate_topk_blocks
        self._block_size = config.candidate_block_size

    def select(self, index_TX: Tensor, x_TD: Tensor, rows: Rows, above: Selection | None) -> Selection:
        """Choose entries; candidates named above stay in force for the layers below."""
        entries = self._indexer.select(*self._queries(index_TX, x_TD, rows), **self._what(rows))
        return Selection(entries, above.candidates_TM if above else None)

    def _what(self, rows: Rows) -> dict[str, Any]:
        """What every selection of this layer is made from, and how many entries it holds."""
        return {
            "keys": self._view.index_keys,
            "rows": rows.index_rows[self._view.ratio],
            "count": self._count,
        }


class CandidateIndexer(Indexer):
    """The candidate source: its own selection is unrestricted, and it names the blocks for those behind it."""

    def select(self, index_TX: Tensor, x_TD: Tensor, rows: Rows, above: Selection | None) -> Selection:
        chosen = self._indexer.select_with_candidates(
            *self._queries(index_TX, x_TD, rows),
            **self._what(rows),
            blocks=self._blocks,
            block_size=self._block_size,
        )
        return Selection(*chosen)


class WithinIndexer(Indexer):
    """A Reindex layer behind the candidate source: scores only what that source kept."""

    def select(self, index_TX: Tensor, x_TD: Tensor, rows: Rows, above: Selection | None) -> Selection:
        assert above is not None and above.candidates_TM is not None, "no layer above named candidates"
        entries = self._indexer.select_within(
            *self._queries(index_TX, x_TD, rows),
            **self._what(rows),
            candidates_TM=above.candidates_TM,
            block_size=self._block_size,
        )
        return Selection(entries, above.candidates_TM)


def indexer_of(
    spec: LayerSpec, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, view: SourceView
) -> Indexer:
    """The indexer that layer ``spec`` is defined to have, over the keys of ``view``."""
    kind = (
        CandidateIndexer if spec.is_candidate_source else WithinIndexer if spec.uses_candidates else Indexer
    )
    return kind(config, parameters, prefix, ops=ops, view=view)
