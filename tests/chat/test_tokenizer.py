"""Case A18: characters that span tokens. Pieces joined are the one-shot decode, whatever the cuts."""

import json
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flashstep.chat.parse import TextParser
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.errors import ConfigError
from tests.chat.conftest import VECTORS

SMALL = VECTORS / "model" / "a_base" / "ckpt" / "tokenizer.json"
pytestmark = pytest.mark.skipif(not SMALL.exists(), reason=f"{SMALL} is absent")


@pytest.fixture(scope="module")
def small() -> TextTokenizer:
    return TextTokenizer.from_file(SMALL)


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    of_byte = {
        tokenizer.token_bytes(i): i for i in range(tokenizer.num_ids) if len(tokenizer.token_bytes(i)) == 1
    }
    return [of_byte[bytes([byte])] for byte in data]


@pytest.mark.parametrize("content", [b"", b"{}", b"no JSON", b"\xff\xfe", None])
def test_what_defines_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not usable"):
        TextTokenizer.from_file(file)


EMOJI = b"\xf0\x9f\x99\x82"


@pytest.mark.parametrize("cuts", [(2, 2), (1, 3), (3, 1), (1, 1, 1, 1), (4,)])
def test_emoji_in_pieces(small: TextTokenizer, cuts: tuple[int, ...]) -> None:
    ids = byte_ids(small, EMOJI)
    stream = small.detokenizer()
    pieces = []
    for cut in cuts:
        pieces.append(stream.push(ids[:cut]))
        ids = ids[cut:]
    assert pieces[:-1] == [""] * (len(cuts) - 1)
    assert pieces[-1] == "\U0001f642"
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"d'\xc4\x8f", "d'\u010f"),
        (b"ab\xf0", "ab\ufffd"),
        (b"\x80", "\ufffd"),
        (b"a\x80b", "a\ufffdb"),
        (b"", ""),
    ],
)
def test_invalid_and_cut_bytes(small: TextTokenizer, data: bytes, text: str) -> None:
    stream = small.detokenizer()
    shown = "".join(stream.push([token]) for token in byte_ids(small, data))
    assert shown + stream.finish() == text


def test_stop_string_of_emoji_matches_and_all_tokens_count(small: TextTokenizer) -> None:
    parser = TextParser(small.detokenizer(), stop=["\U0001f642"])
    ids = byte_ids(small, b"hi" + EMOJI + b"more")
    shown = "".join(parser.push([token]).content for token in ids[:6])
    assert (shown, parser.stopped, parser.num_tokens) == ("hi", "\U0001f642", 6)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_joined_are_the_librarys_decode(data: st.DataObject) -> None:
    tokenizer = TextTokenizer.from_file(SMALL)
    library = Tokenizer.from_file(str(SMALL))
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids - 1), max_size=30))
    skip = data.draw(st.booleans())
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    shown, rest = "", ids
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        shown += stream.push(rest[:cut])
        rest = rest[cut:]
    assert shown + stream.finish() == library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_released_tokenizer_decodes_as_the_library(released: TextTokenizer) -> None:
    library = Tokenizer.from_str(released.definition)
    random.seed(1)
    for _ in range(300):
        ids = [random.randrange(129280) for _ in range(20)]
        assert released.decode(ids) == library.decode(ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(st.text(), st.booleans())
def test_ids_are_the_librarys(text: str, special: bool) -> None:
    small, library = TextTokenizer.from_file(SMALL), Tokenizer.from_file(str(SMALL))
    assert (
        small.encode(text, add_special_tokens=special) == library.encode(text, add_special_tokens=special).ids
    )


def test_other_threads_run_while_a_text_is_encoded(small: TextTokenizer) -> None:
    """The event loop is one: while ``tokenizers``' own ``encode`` runs, no Python does."""
    text = "the quick brown fox " * 20_000
    for encode in (small.encode, small.encode_plain):
        encode("x")
        worker = threading.Thread(target=encode, args=(text,))
        worker.start()
        beats = 0
        while worker.is_alive():
            time.sleep(0.001)
            beats += 1
        assert beats > 3


def test_plain_encoding_makes_no_control_token(small: TextTokenizer) -> None:
    text = "x</think><\uff5cUser\uff5c>\uff5cDSML\uff5c"
    control = {small.id_of("</think>"), small.id_of("<\uff5cUser\uff5c>"), small.id_of("\uff5cDSML\uff5c")}
    assert control <= set(small.encode(text))
    assert not control & set(small.encode_plain(text))
    assert small.decode(small.encode_plain(text)) == text


def test_other_decoders_are_refused(small: TextTokenizer) -> None:
    definition = json.loads(small.definition) | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
    }
    with pytest.raises(ValueError, match="byte-level"):
        TextTokenizer(json.dumps(definition))
