"""The oracle's own reader of the released layout, its own token map, and its command."""

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashstep.config.presets import released
from oracle import model
from oracle.checkpoint import engram_token_map, load
from tests.oracle.golden import ROOT, VECTORS, checkpoint, needs_vectors, recorded
from tests.oracle.tiny import config_a, random_weights

TOKENIZER = VECTORS.parent / "chat" / "tokenizer.json.gz"
MAP_SHA256 = "9fc8ca3588423191ede456ccb9cbfd0e87f8cb41455828a94b66ced5dfd41114"


@needs_vectors
@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_names_are_those_the_forward_reads(name: str) -> None:
    ck = checkpoint(name)
    extra = {n for n in ck.weights if n.endswith("gate.bias_vl")}  # image spans only
    read = set()

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            read.add(key)
            return super().__getitem__(key)

    ids = torch.tensor([[5, 6, 7]])
    model.forward(ck.config, Watched(ck.weights), ids, numerics=model.N2, token_map=ck.token_map)
    assert read == ck.weights.keys() - extra


@needs_vectors
def test_a_checkpoint_may_be_one_file(tmp_path: Path) -> None:
    folder = VECTORS / "a_base" / "ckpt"
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert load(tmp_path).weights.keys() == checkpoint("a_base").weights.keys()


@needs_vectors
def test_weights_are_exact_in_bf16() -> None:
    ck = checkpoint("a_base")
    for name, tensor in ck.weights.items():
        if "hc_" not in name and not name.endswith(("attn_sink", "bias", "bias_vl")):
            assert torch.equal(tensor.bfloat16().double(), tensor.double()), name


@needs_vectors
def test_a_token_map_of_another_size_is_refused(tmp_path: Path) -> None:
    config = config_a(engram_compressed_vocab_size=17)
    with pytest.raises(ValueError, match=r"266 Engram keys.*is 17"):
        engram_token_map(VECTORS / "a_base" / "ckpt" / "tokenizer.json", config)


@pytest.mark.skipif(not TOKENIZER.is_file(), reason=f"the released tokenizer is not at {TOKENIZER}")
def test_the_released_token_map(tmp_path: Path) -> None:
    unpacked = tmp_path / "tokenizer.json"
    unpacked.write_bytes(gzip.decompress(TOKENIZER.read_bytes()))
    ids = engram_token_map(unpacked, released()).tolist()
    assert ids[:12] == list(range(12))
    assert (ids[128799], ids[129264]) == (98611, 99076)
    assert ids[671] == ids[270] == ids[20852] == 237
    assert (ids[223], ids[201], ids[33310]) == (174, 174, 15844)
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == MAP_SHA256


@needs_vectors
def test_the_command_writes_the_logits(tmp_path: Path) -> None:
    ids = recorded("a_base", "logits_native")["L31/ids"].tolist()
    given, out = tmp_path / "ids.json", tmp_path / "logits.safetensors"
    given.write_text(json.dumps(ids), encoding="utf-8")
    folder = VECTORS / "a_base" / "ckpt"
    command = [sys.executable, "-m", "oracle", str(folder), "--ids", str(given), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    ck = checkpoint("a_base")
    expected = model.forward(
        ck.config, ck.weights, torch.tensor([ids]), numerics=model.N2, token_map=ck.token_map
    )
    written = load_file(out)
    assert expected.logits_BTV is not None
    assert torch.equal(written["logits"], expected.logits_BTV[0])
    assert written["ids"].tolist() == ids


def test_random_weights_of_the_tests_have_the_forwards_names() -> None:
    config = config_a()
    assert not [name for name in random_weights(config, 0) if name.endswith(".scale")]
