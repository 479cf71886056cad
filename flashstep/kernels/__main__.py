"""``python -m flashstep.kernels [auto|reference|reference:family.op,...]``: print the table op x implementation."""

import sys

import torch

from flashstep.kernels import TABLE, choices


def main() -> None:
    """Print one line an implementation: chosen, or why not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choices(device, kernels=sys.argv[1] if len(sys.argv) > 1 else "auto")
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
