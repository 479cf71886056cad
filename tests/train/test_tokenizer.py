"""The shipped tokenizer: its control tokens, single digits and line breaks, and that it can be trained again."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from train.corpus import Corpus
from train.dialogue import BOS, EOS, PAD
from train.tokenizer import CONTROL, NOISE, VOCABULARY, train_tokenizer

SHIPPED = Path(__file__).parents[2] / "flashstep/tiny/tokenizer.json"


@pytest.fixture(scope="module", params=["shipped", "trained here"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "shipped":
        return Tokenizer.from_file(str(SHIPPED))
    return train_tokenizer(Corpus.builtin(), documents=2500, paragraphs=50)


def test_vocabulary_and_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.token_to_id(t) for t in CONTROL] == list(range(VOCABULARY - len(CONTROL), VOCABULARY))
    for control in (BOS, EOS, *CONTROL):
        assert (
            tokenizer.encode(f"a{control}b", add_special_tokens=False).ids.count(
                tokenizer.token_to_id(control)
            )
            == 1
        )
    assert NOISE in CONTROL


def test_digits_and_line_breaks_stand_alone(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("12 + 345\n\nnext", add_special_tokens=False).tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == ["1", "2", "3", "4", "5"]
    assert tokens.count("Ċ") == 2


@pytest.mark.parametrize(
    "text",
    ["plain words", "x\ty  z\r\n", "é ü 漢字 🙂", "", "  ", "a\n\n\nb", "<b>5</b>"],
)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_pieces_may_be_cut_at_line_breaks(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    assert ids("The end.\n\nA start 12") == ids("The end.") + ids("\n\n") + ids("A start 12")
