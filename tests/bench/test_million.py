"""A context of 1,048,576 tokens on one GPU: prefilled in chunks, decoded to its last position (issue 4)."""

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch

from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.speculative import SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import build

CONTEXT = 1_048_576
OUTPUT = 64


def six_layers() -> ModelConfig:
    """The released shapes with a window layer, both ratios, a candidate source, a layer behind it, and the draft."""
    return msgspec.structs.replace(
        released(),
        num_hidden_layers=6,
        compress_ratios=(0, 0, 2, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 3),
        index_source_layer_ids=(2, 3, 4),
        candidate_source_layer_id=3,
        engram_layer_ids=(1,),
        engram_num_embeddings=released().engram_num_embeddings[:1],
        dspark_target_layer_ids=(3, 4, 5),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_million_tokens_are_prefilled_and_decoded() -> None:
    config = EngineConfig(
        model=Path("DeepSeek-V4.1-Flash"),
        load_format="dummy",
        emulate="dep32:0",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        hit_policy=HitPolicy.BOUNDED,
        speculative=SpeculativeOptions(),
    )
    engine = Engine(build(config, shapes=six_layers()).runner, seed=0)
    chance = random.Random(0)
    prompt = tuple(chance.randrange(engine.ready.vocab_size) for _ in range(CONTEXT - OUTPUT))
    plain = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    outputs = engine.generate([Request(id="plain", prompt=prompt, params=plain)])["plain"]
    assert sum(len(output.tokens) for output in outputs) == OUTPUT
    # asked again, from the cache, for the numbers behind the last tokens
    told = msgspec.structs.replace(plain, logprobs=1)
    again = engine.generate([Request(id="told", prompt=prompt, params=told)])["told"]
    assert sum(output.cached_tokens or 0 for output in again) > CONTEXT // 2
    logprobs = [p.logprob for output in again for p in output.logprobs]
    assert len(logprobs) == OUTPUT and all(map(math.isfinite, logprobs))
    engine.check_integrity()
