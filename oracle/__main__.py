"""``python -m oracle CKPT --ids IDS.json --out OUT.safetensors``: logits of one sequence, for ``flashstep check``.

Takes a checkpoint folder and a JSON list of token ids; writes ``logits`` fp32 [T, V] and ``ids`` int64 [T]. With
``--draft-at N [N ...]`` it also drafts after each given number n of committed tokens, 1 to T (``all``: 1 to T - 1): the anchor
is token n of the list, or, for n = T, the most probable next token. This adds, for M anchors and K places,
``draft_positions`` int64 [M], ``draft_tokens`` int64 [M, K + 1] (the anchor first, then the greedy chain),
``draft_logits`` fp32 [M, K, V] (with the Markov bias) and ``draft_confidence`` fp32 [M, K] (before the sigmoid).
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from oracle import dspark, model
from oracle.checkpoint import Checkpoint, load


def main() -> None:
    """Parse the arguments, run the forward, save and print the greedy tokens."""
    parser = argparse.ArgumentParser(
        prog="oracle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ids", type=Path, required=True, help="JSON list of token ids")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--tier", choices=sorted(model.TIERS), default="n2")
    parser.add_argument("--draft-at", nargs="+", default=[], metavar="N", help="committed tokens, or all")
    options = parser.parse_args()
    ids = torch.tensor([json.loads(options.ids.read_text(encoding="utf-8"))], dtype=torch.int64)
    positions = _positions(parser, options.draft_at, ids.shape[1])
    checkpoint = load(options.checkpoint, draft=bool(positions))
    if positions and not checkpoint.config.num_nextn_predict_layers:
        parser.error(f"{options.checkpoint} has no draft layers, so --draft-at cannot be used")
    numerics = model.TIERS[options.tier]
    trace: model.Trace | None = {} if positions else None
    with torch.inference_mode():
        output = model.forward(
            checkpoint.config,
            checkpoint.weights,
            ids,
            numerics=numerics,
            token_map=checkpoint.token_map,
            trace=trace,
        )
        assert output.logits_BTV is not None
        logits = output.logits_BTV[0]
        found = {"logits": logits.contiguous(), "ids": ids[0]}
        if trace is not None:
            following = torch.cat((ids[0], logits[-1:].argmax(-1)))
            found |= _drafts(checkpoint, trace, following, positions, numerics=numerics)
    save_file(found, options.out)
    print(
        f"{ids.shape[1]} positions, tier {options.tier}, greedy: {logits.argmax(-1)[-8:].tolist()} ..., "
        f"{len(positions)} drafts"
    )


def _positions(parser: argparse.ArgumentParser, given: list[str], length: int) -> list[int]:
    """The numbers of committed tokens to draft after."""
    if given == ["all"]:
        return list(range(1, length))
    if any(not n.isdecimal() or not 1 <= int(n) <= length for n in given):
        parser.error(
            f"--draft-at takes numbers from 1 to {length} (the length of --ids), or all; not {given}"
        )
    return [int(n) for n in given]


def _drafts(
    checkpoint: Checkpoint,
    trace: model.Trace,
    following: Tensor,
    positions: list[int],
    *,
    numerics: model.Numerics,
) -> dict[str, Tensor]:
    """What ``--draft-at`` adds to the file; ``following`` [T + 1] holds the anchors' tokens by position."""
    config, weights = checkpoint.config, checkpoint.weights
    at = torch.tensor(positions)
    anchors = dspark.Anchors(sequence=torch.zeros_like(at), position=at, token=following[at])
    streams = dspark.features(config, trace, numerics=numerics)
    block = dspark.draft(config, weights, streams, anchors, numerics=numerics)
    drafts = dspark.chain(config, weights, block, anchors.token, numerics=numerics)
    return {
        "draft_positions": at,
        "draft_tokens": drafts.tokens.contiguous(),
        "draft_logits": drafts.logits_MKV.contiguous(),
        "draft_confidence": drafts.confidence_MK.contiguous(),
    }


if __name__ == "__main__":
    main()
