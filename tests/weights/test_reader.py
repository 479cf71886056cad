"""Files of a checkpoint that hold anything: what is wrong is a sentence, and nothing is opened that the folder does not hold."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from flashstep.weights.reader import INDEX, Checkpoint
from tests.json_values import texts

SHARD = "model-00001-of-00001.safetensors"
WHOLE = save({"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)})


def opened(*, index: str, shard: bytes) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / INDEX).write_text(index, encoding="utf-8", errors="surrogatepass")
        (Path(folder) / SHARD).write_bytes(shard)
        return Checkpoint(Path(folder))


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=24), at=st.integers(0, len(WHOLE)), cuts=st.booleans())
def test_a_shard_of_any_bytes(noise: bytes, at: int, cuts: bool) -> None:
    """A header is read, or it is told to be damaged; no tensor is there that lies outside the file."""
    shard = WHOLE[:at] + noise + (b"" if cuts else WHOLE[at + len(noise) :])
    checkpoint = opened(index=json.dumps({"weight_map": {"a": SHARD, "b": SHARD}}), shard=shard)
    assert checkpoint.problems or checkpoint.entries.keys() == {"a", "b"}
    assert all(isinstance(problem, str) and problem for problem in checkpoint.problems)


@settings(max_examples=150, deadline=None)
@given(
    index=texts(["weight_map", "metadata"])
    | st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([SHARD, "x", "../x", "", "."])).map(
        lambda places: json.dumps({"weight_map": places})
    )
)
def test_an_index_of_any_text(index: str) -> None:
    checkpoint = opened(index=index, shard=WHOLE)
    agrees = '"weight_map"' in index and not checkpoint.problems
    assert agrees <= (checkpoint.entries.keys() == {"a", "b"})
