"""The cache groups: what the model keeps for each token, in bytes, derived from the configuration alone (torch-free).

window       one record a layer and token, only the last ``sliding_window`` positions are ever read; paged
compressed   one record a KV source and entry (an entry spans ``ratio`` tokens); paged, global
index keys   one record a KV source and entry; paged, global
tail         the fp32 (value, score) rows of the open ratio-2 group, a ring keyed by position; one per slot and source; as long
             as a step's drafts need, so that rejected ones need no undo (spec/model.md 3.4)
lookback     the token ids an Engram hash looks back on; they live in the runner's token history and need no memory here

Sizes: spec/model.md 10. "global" groups share one block table: a block holds ``block_size`` tokens' entries of all sources.
"""

import msgspec

from flashstep.config.model import MX_GROUP, NV_GROUP, ModelConfig

TAIL_RING = 8  # rows, at least


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one token (or entry) of a group: packed values, then their scales."""

    data_bytes: int
    scale_bytes: int

    @property
    def bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


class CacheGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a model and where they are kept."""

    window: Record
    compressed: Record
    index_key: Record
    window_layers: tuple[int, ...]  # every layer has a window; the draft's layers, if it is used, are last
    sources: tuple[tuple[int, int], ...]  # (layer, ratio) of each KV source
    sliding_window: int
    head_dim: int
    tail_ring: int  # rows of a tail

    @classmethod
    def of(cls, config: ModelConfig, *, drafts: bool = False) -> "CacheGroups":
        """The groups of the backbone, or of backbone and draft: a step then verifies up to a draft block's tokens."""
        layers = config.num_hidden_layers + (config.num_nextn_predict_layers if drafts else 0)
        return cls(
            window=Record(data_bytes=config.head_dim, scale_bytes=config.head_dim // MX_GROUP),
            compressed=Record(data_bytes=config.head_dim // 2, scale_bytes=config.head_dim // NV_GROUP),
            index_key=Record(
                data_bytes=config.index_head_dim // 2, scale_bytes=config.index_head_dim // MX_GROUP
            ),
            window_layers=tuple(range(layers)),
            sources=tuple((layer, config.compress_ratios[layer]) for layer in config.kv_source_layer_ids),
            sliding_window=config.sliding_window,
            head_dim=config.head_dim,
            tail_ring=max(TAIL_RING, config.dspark_block_size + 2) if drafts else TAIL_RING,
        )

    @property
    def global_bytes_per_token(self) -> float:
        """Global KV of one token over all sources; 890 at the released shapes."""
        entry = self.compressed.bytes + self.index_key.bytes
        return sum(entry / ratio for _, ratio in self.sources)

    @property
    def global_bytes_per_pair(self) -> int:
        """Global KV of two tokens, which is always whole: a ratio-2 source keeps one entry of them."""
        entry = self.compressed.bytes + self.index_key.bytes
        return sum(2 // ratio * entry for _, ratio in self.sources)

    @property
    def window_bytes_per_token(self) -> int:
        return self.window.bytes * len(self.window_layers)

    @property
    def tail_bytes_per_slot(self) -> int:
        pair = 2 * self.head_dim * 4  # value and score, fp32
        return sum(self.tail_ring * pair for _, ratio in self.sources if ratio == 2)
