"""Makes ``rejection_excerpt.npz`` from the golden vectors: ``python tests/vectors/make_rejection_excerpt.py ../shared/vectors``.

The excerpt is the small half of ``speculation/rejection_cases.npz`` (vocabularies of 4 to 16): inputs and outcomes of SGLang's
verification kernel, so that a clone without the vectors still tests against foreign values.
"""

import sys
from pathlib import Path

import numpy as np

LARGEST_VOCABULARY = 16


def main(vectors: Path) -> None:
    recorded = np.load(vectors / "speculation" / "rejection_cases.npz")
    cases = sorted({name.split("/")[0] for name in recorded.files if "/" in name})
    small = {c for c in cases if recorded[f"{c}/target_probs"].shape[1] <= LARGEST_VOCABULARY}
    arrays = {name: recorded[name] for name in recorded.files if name.split("/")[0] in small}
    np.savez_compressed(Path(__file__).with_name("rejection_excerpt.npz"), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
