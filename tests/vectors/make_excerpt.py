"""Makes ``attention_excerpt.npz`` from the golden vectors: ``python tests/vectors/make_excerpt.py ../shared/vectors``.

The excerpt is the attention half of a_base's layer 4 (Full, ratio 1, candidate source): its stored weights, the recorded
input of length 31 and the recorded output, so that a clone without the vectors still tests against foreign values.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

LAYER = 4


def main(vectors: Path) -> None:
    base = vectors / "model" / "a_base"
    arrays = {}
    for shard in sorted((base / "ckpt").glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                place = name.removeprefix(f"layers.{LAYER}.")
                if place != name and place.startswith(("attn", "hc_attn")):
                    tensor = file.get_tensor(name)
                    width = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[tensor.element_size()]
                    arrays[f"{place}|{str(tensor.dtype).removeprefix('torch.')}"] = tensor.view(width).numpy()
    recorded = np.load(base / "inter_native.npz")
    arrays["in/h"] = torch.tensor(recorded[f"L31/layer{LAYER - 1}/h"]).bfloat16().view(torch.int16).numpy()
    arrays["in/pre_mix"] = recorded[f"L31/layer{LAYER - 1}/pre_mix"]
    for name in ("attn_out", "latent", "topk", "topk_margin", "candidates", "candidates_shape"):
        arrays[f"out/{name}"] = recorded[f"L31/layer{LAYER}/{name}"]
    np.savez_compressed(Path(__file__).with_name("attention_excerpt.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
