"""Trained weights to a checkpoint in the released layout: ``python -m train.export --packed DIR/packed.pt --out FOLDER``.

Takes what ``Parameters.packed`` gives (the stored bytes of each stack, made where the masters live), splits stacks into
released names and writes config, tokenizer, shards and index. The values equal the fake-quantised ones of training.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.weights.write import write_checkpoint
from train.parameters import Kind, kinds
from train.shape import SMOKE, TINY, config_json
from train.tokenizer import write as write_tokenizer

SHARD_BYTES = 8 << 20


def stored(table: Mapping[str, Kind], packed: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Released name (with ``.scale`` pairs) -> tensor, of every stack of ``table``."""
    tensors: dict[str, Tensor] = {}
    for key, kind in table.items():
        data, *scale = packed[key]
        for index, name in enumerate(kind.names):
            tensors[name] = data[index].clone()
            if scale:
                tensors[name.removesuffix(".weight") + ".scale"] = scale[0][index].clone()
    return tensors


def export(
    packed: Mapping[str, tuple[Tensor, ...]], tokenizer: Tokenizer, folder: Path, *, smoke: bool = False
) -> ModelConfig:
    """Write the whole checkpoint folder; the configuration is the one that ``train.tiny`` trained."""
    data = config_json(tokenizer, SMOKE if smoke else TINY)
    config = ModelConfig.parse(data)
    write_checkpoint(folder, data, tensors=stored(kinds(config), packed), shard_bytes=SHARD_BYTES)
    write_tokenizer(tokenizer, folder, max_length=config.max_position_embeddings)
    return config


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(prog="python -m train.export", description=__doc__)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("flashstep/tiny/tokenizer.json"))
    parser.add_argument("--smoke", action="store_true", help="the weights are of a smoke run")
    o = parser.parse_args()
    export(
        torch.load(o.packed, map_location="cpu"), Tokenizer.from_file(str(o.tokenizer)), o.out, smoke=o.smoke
    )
    total = sum(file.stat().st_size for file in o.out.iterdir())
    print(f"{o.out}: {total / 1e6:.2f} MB in {len(list(o.out.iterdir()))} files")


if __name__ == "__main__":
    main()
