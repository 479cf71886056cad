"""``python -m oracle CKPT --ids IDS.json --out LOGITS.safetensors``: logits of one sequence, for ``flashstep check``.

Takes a checkpoint folder and a JSON list of token ids; writes ``logits`` fp32 [T, V] and ``ids`` int64 [T].
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from oracle import model
from oracle.checkpoint import load


def main() -> None:
    """Parse the arguments, run the forward, save and print the greedy tokens."""
    parser = argparse.ArgumentParser(prog="oracle", description="Logits of the reference forward.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ids", type=Path, required=True, help="JSON list of token ids")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--tier", choices=sorted(model.TIERS), default="n2")
    options = parser.parse_args()
    checkpoint = load(options.checkpoint)
    ids = torch.tensor([json.loads(options.ids.read_text(encoding="utf-8"))], dtype=torch.int64)
    with torch.inference_mode():
        output = model.forward(
            checkpoint.config,
            checkpoint.weights,
            ids,
            numerics=model.TIERS[options.tier],
            token_map=checkpoint.token_map,
        )
    assert output.logits_BTV is not None
    save_file({"logits": output.logits_BTV[0].contiguous(), "ids": ids[0]}, options.out)
    print(
        f"{ids.shape[1]} positions, tier {options.tier}, greedy: {output.logits_BTV[0].argmax(-1)[-8:].tolist()} ..."
    )


if __name__ == "__main__":
    main()
