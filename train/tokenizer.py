"""The tiny model's tokenizer: byte-level BPE of 2,048 entries with DeepSeek's control spellings and single digits.

``train_tokenizer`` learns it from generated dialogues and corpus paragraphs; ``write`` stores ``tokenizer.json`` and
``tokenizer_config.json``. Line breaks and digits are always tokens of their own (``train.dialogue`` relies on that).
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.corpus import DEFAULT_FILE, Corpus
from train.data import draw
from train.dialogue import BOS, DSML, EOS, PAD, render

VOCABULARY = 2048
NOISE = "<｜place▁holder▁no▁0｜>"  # the noise token of a later draft model
CONTROL = (
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", DSML, "<｜latest_reminder｜>", "<｜image｜>",
    "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>", NOISE,
)  # fmt: skip
WORDS = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
DOCUMENTS, PARAGRAPHS = 40_000, 15_000


def texts(corpus: Corpus, *, documents: int, paragraphs: int, seed: int = 17) -> Iterator[str]:
    """What the merges are learnt from: dialogues of the training mix and manual text, control spellings cut out."""
    rng = random.Random(seed)
    filler = [(text, len(text) // 4) for text in corpus.paragraphs]
    for _ in range(documents):
        dialogue = draw(rng, corpus, filler, short=True)
        for piece in render(dialogue) if not isinstance(dialogue, str) else ():
            yield piece.text
    yield from corpus.paragraphs[:paragraphs]


def train_tokenizer(corpus: Corpus, *, documents: int = DOCUMENTS, paragraphs: int = PARAGRAPHS) -> Tokenizer:
    """Learn the merges; ids 0, 1, 2 are BOS, EOS and PAD, the other control tokens close the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join((BOS, EOS, PAD, *CONTROL))), behavior="removed"),
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    first = [AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, PAD)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL),
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus, documents=documents, paragraphs=paragraphs), trainer=trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CONTROL])
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Store the tokenizer as the released checkpoints do."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """``python -m train.tokenizer FOLDER``: train and write it."""
    corpus = Corpus.read(DEFAULT_FILE)
    write(train_tokenizer(corpus), Path(sys.argv[1]), max_length=1_048_576)


if __name__ == "__main__":
    main()
