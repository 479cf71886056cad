"""``python -m flashstep.kernels [auto|reference|reference:family.op,...] [--batch-invariant]``: print op x implementation."""

import sys

import torch

from flashstep.kernels import TABLE, choices

BATCH_INVARIANT = "--batch-invariant"


def main() -> None:
    """Print one line an implementation: chosen, or why not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [word for word in sys.argv[1:] if word != BATCH_INVARIANT]
    chosen = choices(
        device, kernels=words[0] if words else "auto", batch_invariant=BATCH_INVARIANT in sys.argv[1:]
    )
    width = max(len(row.op) for row in TABLE)
    lines = [f"device: {device}"]
    for op, choice in chosen.items():
        for module, reason in choice.passed_over:
            lines.append(f"{op:<{width}}  passed  {module}  ({reason})")
        others = "" if choice.passed_over else "  (first row that fits)"
        lines.append(f"{op:<{width}}  chosen  {choice.chosen.module}{others}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
