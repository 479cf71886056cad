"""Trained weights to a checkpoint in the released layout: ``python -m train.export --packed DIR/packed.pt --out FOLDER``.

``--draft DIR/draft.pt --target FOLDER`` instead adds a draft to the checkpoint that it was trained for; the backbone's tensors
are copied byte for byte, and ``--out`` may be the same folder.
Takes what ``Parameters.packed`` gives (the stored bytes of each stack, made where the masters live), splits stacks into
released names and writes config, tokenizer, shards and index. The values equal the fake-quantised ones of training.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.weights.write import write_checkpoint
from train.draft_parameters import draft_kinds
from train.parameters import Kind, kinds
from train.shape import SMOKE, TINY, config_json, with_draft
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


def backbone(folder: Path) -> dict[str, Tensor]:
    """The stored tensors of ``folder``, without a draft's."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if not name.startswith("mtp.")]  # noqa: SIM118 - not a mapping
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def export_draft(packed: Mapping[str, tuple[Tensor, ...]], target: Path, folder: Path) -> ModelConfig:
    """Write ``target`` with the draft of ``train.dspark`` into ``folder``, which may be ``target``."""
    tensors = backbone(target)
    data = json.loads((target / "config.json").read_text(encoding="utf-8"))
    data = with_draft(data, len(packed["attn_norm.weight"][0]))
    config = ModelConfig.parse(data)
    tensors |= stored(draft_kinds(config), packed)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder.resolve() != target.resolve():
            shutil.copyfile(target / name, folder / name)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()  # the number of shards is part of their names
    write_checkpoint(folder, data, tensors=tensors, shard_bytes=SHARD_BYTES)
    return config


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(prog="python -m train.export", description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--packed", type=Path, help="packed.pt of train.tiny")
    given.add_argument("--draft", type=Path, help="draft.pt of train.dspark")
    parser.add_argument(
        "--target", type=Path, default=Path("flashstep/tiny"), help="what --draft is added to"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("flashstep/tiny/tokenizer.json"))
    parser.add_argument("--smoke", action="store_true", help="the weights are of a smoke run")
    o = parser.parse_args()
    if o.draft:
        export_draft(torch.load(o.draft, map_location="cpu"), o.target, o.out)
    else:
        tokenizer = Tokenizer.from_file(str(o.tokenizer))
        export(torch.load(o.packed, map_location="cpu"), tokenizer, o.out, smoke=o.smoke)
    total = sum(file.stat().st_size for file in o.out.iterdir())
    print(f"{o.out}: {total / 1e6:.2f} MB in {len(list(o.out.iterdir()))} files")


if __name__ == "__main__":
    main()
