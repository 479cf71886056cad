"""The token map: goldens of spec/model.md 6.1, the refusal of wrong sizes, and fingerprints (case A34)."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.engram.token_map import TokenMap, parse_tokenizer
from tests.json_values import texts

RELEASED = Path(__file__).parents[3].joinpath("shared/vectors/chat/tokenizer.json.gz")
GOLDEN = Path(__file__).parents[3].joinpath("shared/vectors/model/a_base/ckpt")
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="golden checkpoints are not here")


@pytest.mark.skipif(not RELEASED.is_file(), reason="the released tokenizer is not here")
def test_released_map() -> None:
    tokenizer = Tokenizer.from_str(gzip.decompress(RELEASED.read_bytes()).decode())
    built = TokenMap.build(tokenizer)
    assert (len(built.ids), built.size) == (129280, 99092)
    assert built.ids[:12] == tuple(range(12))
    assert (built.ids[128799], built.ids[129264], built.ids[33310]) == (98611, 99076, 15844)
    assert {built.ids[token] for token in (671, 270, 20852)} == {237}
    assert built.ids[223] == built.ids[201] == 174
    assert built.fingerprint == "9fc8ca3588423191ede456ccb9cbfd0e87f8cb41455828a94b66ced5dfd41114"


def _tokenizer(words: list[str]) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(words)}
    return Tokenizer.from_str(
        json.dumps(
            {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}, "added_tokens": []}
        )
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["the", "The", "THE"], (0, 0, 0)),
        (["e", "\u00e9", "e\u0301"], (0, 0, 0)),  # accents go, composed or not
        (["\ufb01", "fi"], (0, 0)),  # NFKC
        ([" x", "x ", "x"], (0, 0, 0)),  # ends are stripped
        (["a\t\r\nb", "a b"], (0, 0)),  # runs of blanks
        ([" ", "\n", "\n\t"], (0, 0, 0)),  # a lone blank stays a blank
        (["\u0301", "x"], (0, 1)),  # nothing is left: the text itself is the key
        (["b\ufffd", "B\ufffd", "b"], (0, 1, 2)),  # no text on its own: the raw vocabulary string
    ],
)
def test_normalisation(words: list[str], expected: tuple[int, ...]) -> None:
    assert TokenMap.build(_tokenizer(words)).ids == expected


@golden
def test_wrong_tokenizers_are_refused_with_both_sizes(tmp_path: Path) -> None:
    config = ModelConfig.read(GOLDEN)
    (tmp_path / "tokenizer.json").write_text(_tokenizer(["a", "b", "A"]).to_str(), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        TokenMap.read(tmp_path, config)
    assert len(caught.value.problems) == 2
    assert "3 tokens; the model's vocab_size is 320" in caught.value.problems[0]
    assert "2 distinct ids; the model's engram_compressed_vocab_size is 266" in caught.value.problems[1]


@golden
def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TokenMap.read(tmp_path, ModelConfig.read(GOLDEN))


@golden
@pytest.mark.parametrize("content", [b"", b"{}", b"no JSON", b"\xff\xfe"])
def test_what_defines_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not usable"):
        TokenMap.read(tmp_path, ModelConfig.read(GOLDEN))


def test_swapped_ids_change_the_fingerprint_and_nothing_else() -> None:
    one = TokenMap.build(_tokenizer(["a", "b", "A", "c"]))
    other = TokenMap.build(_tokenizer(["a", "b", "c", "A"]))
    assert (len(one.ids), one.size) == (len(other.ids), other.size)
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == TokenMap.of(one.ids).fingerprint


@settings(max_examples=100, deadline=None)
@given(texts(["version", "model", "added_tokens", "pre_tokenizer", "decoder", "normalizer"]))
def test_any_text_defines_a_tokenizer_or_is_refused(text: str) -> None:
    try:
        parse_tokenizer(text)
    except ValueError as error:
        assert "does not define a tokenizer" in str(error)
