"""The embedded model as whole engines, with drafts and without; a question to it, and a form for its answers."""

import gc
from collections.abc import Callable

import pytest
import torch

from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder, ChatPrompt
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.runner.build import build_runner
from tests.runner.conftest import DEVICES

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    torch.set_num_threads(1)
    return TextTokenizer.from_file(tiny_model() / "tokenizer.json")


@pytest.fixture(scope="module")
def prompt(tokenizer: TextTokenizer) -> ChatPrompt:
    content = "Anna has 12 pens and buys 4 boxes with 6 pens each. How many pens does Anna have now?"
    return ChatEncoder(tokenizer).encode(Conversation(messages=[{"role": "user", "content": content}]))


@pytest.fixture(scope="module", params=DEVICES)
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """It takes ``SpeculativeOptions``; none: no drafts."""

    def make(**options: object) -> Engine:
        gc.collect()  # what an earlier engine has pinned is given back now, and not while graphs are captured
        config = EngineConfig(
            model=tiny_model(),
            max_num_seqs=16,
            max_model_len=512,
            kv_cache_memory_bytes=1 << 25,
            speculative=SpeculativeOptions(**options) if options else None,
            **request.param,
        )
        return Engine(build_runner(config), seed=0)

    return make
