"""Tokenizers and vectors that the chat tests share. The released tokenizer is read from ../shared and never copied."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"


def load_vectors(name: str) -> Any:
    path = VECTORS / "chat" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def released() -> TextTokenizer:
    path = VECTORS / "chat" / "tokenizer.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return TextTokenizer(gzip.decompress(path.read_bytes()).decode("utf-8"))


@pytest.fixture(scope="session")
def encoder(released: TextTokenizer) -> ChatEncoder:
    return ChatEncoder(released)
