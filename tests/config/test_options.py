"""Command-line options: ranges, all problems at once, and the engine's half carried over whole."""

from pathlib import Path

import msgspec
import pytest

from flashstep.config.cache import HitPolicy
from flashstep.config.engine import LOAD_FORMATS, SCHEDULING_POLICIES, EngineConfig
from flashstep.config.engine_options import EngineOptions
from flashstep.config.errors import ConfigError
from flashstep.config.server import ServerOptions, check_serving
from flashstep.config.speculative import RejectionSampleMethod, SpeculativeOptions


def checked(**values) -> None:
    """The command line of ``flashstep serve`` with ``values``, whoever takes them."""
    server = {name: values.pop(name) for name in ServerOptions.__struct_fields__ if name in values}
    check_serving(EngineOptions(**values), ServerOptions(**server))


def found(**values) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(**values)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0"),
        ({"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold is -1"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"block_size": 33}, "--block-size is 33; it must be even"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes is 0"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"kernels": "fast"}, "--kernels is 'fast'"),
        ({"kernels": "reference:gemm"}, "FAMILY.OP"),
        ({"port": 65536}, "--port is 65536"),
        ({"host": ""}, "--host is empty"),
        ({"served_model_name": (" ",)}, "--served-model-name holds ' '"),
        ({"served_model_name": ("a", "a")}, "one name twice"),
        ({"speculative_config": '{"method": "eagle"}'}, "--speculative-config: method is"),
        ({"speculative_config": "{"}, "--speculative-config: "),
        ({"engram_config": '{"offload": true}'}, "--engram-config: offload is not a known field"),
        ({"numa_bind": True, "device": "cpu"}, "--numa-bind is set and --device is cpu"),
        ({"routing": "recorded"}, "--expert-loads is not given"),
        ({"expert_loads": __file__}, "--routing is real and --expert-loads is "),
        ({"routing": "recorded", "expert_loads": "/none/such"}, "there is no such file"),
        ({"record_expert_loads": "/none/such"}, "there is no folder /none"),
        (
            {"routing": "recorded", "expert_loads": __file__, "record_expert_loads": __file__},
            "are one file",
        ),
        ({"fill_cache": True, "fill_cache_std": -1.0}, "--fill-cache-std is -1.0"),
        ({"fill_cache": True, "fill_cache_std": float("nan")}, "--fill-cache-std is nan"),
        ({"fill_cache_std": 1.0}, "--fill-cache is not given"),
        ({"per_request_spec_decode_metrics": "summary"}, "nothing to tell without --speculative-config"),
    ],
)
def test_each_value_out_of_range_is_a_sentence(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match="command line") as caught:
        checked(**values)
    assert len(caught.value.problems) == 1 and sentence in caught.value.problems[0]


def test_all_problems_are_told_at_once() -> None:
    assert len(found(port=-1, block_size=-3, max_num_seqs=0, kernels="x")) == 5
    two = '{"num_speculative_tokens": 0, "tree": 3}'
    told = found(port=-1, speculative_config=two)
    assert len(told) == 3 and sum(sentence.startswith("--speculative-config: ") for sentence in told) == 2


def test_defaults_are_usable() -> None:
    checked()


def test_every_engine_option_reaches_the_engine(tmp_path: Path) -> None:
    options = EngineOptions(
        load_format="dummy",
        emulate="dep8:3",
        seed=7,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=17,
        long_prefill_token_threshold=9,
        scheduling_policy="priority",
        block_size=8,
        kv_cache_memory_bytes=12345,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=44,
        enable_prefix_caching=False,
        prefix_hit_policy=HitPolicy.BOUNDED,
        engram_config='{"use_thp": true}',
        numa_bind=True,
        speculative_config='{"num_speculative_tokens": 3, "rejection_sample_method": "block"}',
        device="cuda",
        enforce_eager=True,
        batch_invariant=True,
        kernels="reference",
        routing="recorded",
        expert_loads=__file__,
        record_expert_loads=str(tmp_path / "loads"),
        fill_cache=True,
        fill_cache_std=0.5,
    ).checked()
    engine = options.engine(Path("somewhere"))
    default = EngineConfig(model=Path())
    for field in msgspec.structs.fields(EngineConfig):
        assert getattr(engine, field.name) != getattr(default, field.name), field.name
    assert engine.speculative == SpeculativeOptions(
        num_speculative_tokens=3, rejection_sample_method=RejectionSampleMethod.BLOCK
    )
    assert (
        len(msgspec.structs.fields(EngineConfig)) == len(msgspec.structs.fields(EngineOptions)) + 1
    )  # the model


def test_what_makes_texts_wrong_is_told() -> None:
    synthetic = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}'
    assert EngineOptions(speculative_config="{}").engine(Path("m")).falsifies == ()
    assert EngineOptions(record_expert_loads="loads").engine(Path("m")).falsifies == ()
    every = EngineOptions(routing="uniform", fill_cache=True, speculative_config=synthetic)
    assert every.engine(Path("m")).falsifies == ("synthetic acceptance", "uniform routing", "filled cache")


def test_option_defaults_are_the_engines() -> None:
    assert EngineOptions().engine(Path("m")) == EngineConfig(model=Path("m"))


def test_choices_are_the_engines() -> None:
    choices = {field.name: field.type for field in msgspec.structs.fields(EngineOptions)}
    assert choices["load_format"].__args__ == LOAD_FORMATS
    assert choices["scheduling_policy"].__args__ == SCHEDULING_POLICIES
