"""An engine's memory, read back: what it holds for the positions that are settled."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.config.engine import EngineConfig
from flashstep.engine.engine import Engine
from flashstep.runner import build
from flashstep.runner.histories import History
from flashstep.runner.runner import ModelRunner

RECENT = 24


class Memory:
    """The runner and the pool of an engine, and the records of one request in it."""

    def __init__(self, runner: ModelRunner, pool: CachePool) -> None:
        self.runner = runner
        self.pool = pool

    @classmethod
    def build(cls, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> "Memory":
        pools: list[CachePool] = []

        def keep(*args: object, **options: object) -> CachePool:
            pools.append(CachePool(*args, **options))
            pools[0].poison()
            return pools[0]

        monkeypatch.setattr(build, "CachePool", keep)
        return cls(build.build_runner(config), pools[0])

    def engine(self) -> Engine:
        return Engine(self.runner, seed=0)

    def lengths(self) -> dict[int, int]:
        """Tokens of each running request, by seed."""
        return {history.request.params.seed: history.length for _, history in self._running()}

    def settled(self, *, layers: range) -> dict[int, dict[tuple, bytes]]:
        """By seed, records of rows that have run on a token that stands: windows, entries, index keys, an open pair's half.

        Keys say what a record is; its bytes are final, whenever and by however many drafts it was written. Of the entries, which
        grow with a sequence, those of the last ``RECENT`` tokens, and all of them now and then.
        """
        return {
            history.request.params.seed: self._of(slot, history.length - 1, layers=layers)
            for slot, history in self._running()
        }

    def _running(self) -> list[tuple[int, History]]:
        holders = enumerate(self.runner._slots._holders)
        return [(slot, history) for slot, history in holders if history is not None]

    def _of(self, slot: int, rows: int, *, layers: range) -> dict[tuple, bytes]:
        """``rows``: the newest token has not run."""
        slots, size, window = self.runner._slots, self.pool.block_size, self.runner.facts.sliding_window
        found: dict[tuple, bytes] = {}
        for layer in layers:
            for position in range(max(rows - window, 0), rows):
                planes = self.pool.window(layer).planes
                found["window", layer, position] = _record(
                    planes, int(slots.window_blocks[slot, position // size]), position % size
                )
        first = 0 if rows % 8 == 0 else max(rows - RECENT, 0)
        for source, ratio in self.pool._groups.sources:
            view = self.pool.source(source)
            for entry in range(first // ratio, rows // ratio):
                block, place = divmod(entry * ratio, size)
                for kind, planes in (("entry", view.compressed), ("key", view.index_keys)):
                    found[kind, source, entry] = _record(
                        planes, int(slots.blocks[slot, block]), place // ratio
                    )
            if view.tail is not None and rows % ratio:
                row = view.tail[slot, (rows - 1) % view.tail.shape[1]]
                found["tail", source, rows - 1] = row.numpy().tobytes()
        return found


def _record(planes: tuple[Tensor, Tensor], block: int, place: int) -> bytes:
    assert block >= 0, "a record that is needed lies in no block"
    return torch.cat([plane[block, place].flatten() for plane in planes]).numpy().tobytes()


def engine_config(folder: Path, **options: object) -> EngineConfig:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "max_model_len": 256,
        "block_size": 4,
        "kv_cache_memory_bytes": 8 << 20,
    }
    return EngineConfig(model=folder, **(defaults | options))
