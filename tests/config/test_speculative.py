"""``--speculative-config``: every refusal is a sentence, all at once; what is left means one thing."""

import json

import msgspec
import pytest
from hypothesis import given, settings

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.speculative import (
    NOT_OURS,
    OTHER_METHODS,
    DraftSampleMethod,
    RejectionSampleMethod,
    Speculation,
    SpeculativeOptions,
    speculation,
)
from tests.json_values import texts

SYNTHETIC = {"rejection_sample_method": "synthetic"}
RANGES = "num_speculative_tokens_per_batch_size"


def parsed(**fields) -> SpeculativeOptions:
    return SpeculativeOptions.parse(json.dumps(fields))


def refusals(model: ModelConfig | None = None, /, **fields) -> tuple[str, ...]:
    """The problems of ``fields``: of the text alone, or, where it passes, of the text and ``model``."""
    with pytest.raises(ConfigError) as caught:
        options = parsed(**fields)
        assert model is not None
        speculation(options, model)
    assert caught.value.subject == "--speculative-config"
    return caught.value.problems


def test_defaults_are_the_checkpoints() -> None:
    assert speculation(parsed(), released()) == Speculation(num_tokens=5)
    assert parsed() == SpeculativeOptions()
    nothing = parsed(
        method=None,
        num_speculative_tokens=None,
        synthetic_acceptance_length=None,
        synthetic_acceptance_rates=None,
    )
    assert nothing == SpeculativeOptions()


def test_every_field_arrives() -> None:
    options = parsed(
        method="dspark",
        num_speculative_tokens=3,
        draft_sample_method="probabilistic",
        rejection_sample_method="block",
        enable_adaptive_verification=True,
        num_speculative_tokens_per_batch_size=[[17, 64, 1], [1, 16, 3], [65, 1000, 0]],
    )
    resolved = speculation(options, released())
    assert resolved == Speculation(
        num_tokens=3,
        draft_sample_method=DraftSampleMethod.PROBABILISTIC,
        rejection_sample_method=RejectionSampleMethod.BLOCK,
        adaptive=True,
        by_batch_size=((17, 64, 1), (1, 16, 3), (65, 1000, 0)),
    )
    assert [resolved.depth(size) for size in (1, 16, 17, 64, 65, 1000, 1001)] == [3, 3, 1, 1, 0, 0, 3]
    assert not resolved.synthetic


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (3.51, 5, (1, 1, 0.51, 0, 0)),
        (1, 5, (0, 0, 0, 0, 0)),
        (6, 5, (1, 1, 1, 1, 1)),
        (1.25, 1, (0.25,)),
        (2.9, 3, (1, 0.9, 0)),
    ],
)
def test_a_length_becomes_rates(length: float, k: int, rates: tuple[float, ...]) -> None:
    options = parsed(**SYNTHETIC, synthetic_acceptance_length=length, num_speculative_tokens=k)
    resolved = speculation(options, released())
    assert resolved.acceptance_rates == rates and resolved.synthetic
    assert 1 + sum(resolved.acceptance_rates) == pytest.approx(length)


def test_rates_are_taken_as_they_are() -> None:
    rates = (0.9, 0.9, 0.2, 0.0, 0.0)
    assert (
        speculation(parsed(**SYNTHETIC, synthetic_acceptance_rates=rates), released()).acceptance_rates
        == rates
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it is not JSON"),
        ("{'method': 'dspark'}", "it is not JSON"),
        ("[]", "it is []; expected a JSON object"),
        ("null", "it is null; expected a JSON object"),
        ('{"method": "dspark", "method": "dspark"}', "it names method twice"),
    ],
)
def test_text_that_is_no_object(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeOptions.parse(text)
    assert len(caught.value.problems) == 1 and sentence in caught.value.problems[0]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": 3}, "tokens is not a known field; known are method, num_speculative_tokens"),
        ({"method": "dsparc"}, 'the only method is "dspark"'),
        ({"method": ["dspark"]}, 'the only method is "dspark"'),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be at least 1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is true; it must be an integer"),
        ({"num_speculative_tokens": 3.0}, "num_speculative_tokens is 3.0; it must be an integer"),
        ({"num_speculative_tokens": "3"}, 'num_speculative_tokens is "3"; it must be an integer'),
        ({"num_speculative_tokens": 6}, "num_speculative_tokens is 6; this checkpoint's draft makes 1 to 5"),
        ({"draft_sample_method": "random"}, "allowed are greedy and probabilistic"),
        ({"draft_sample_method": None}, "allowed are greedy and probabilistic"),
        ({"rejection_sample_method": "typical"}, "allowed are standard, block, synthetic"),
        ({"rejection_sample_method": ["block"]}, "allowed are standard, block, synthetic"),
        ({"rejection_sample_method": "fly"}, "it changes the output's distribution"),
        ({"enable_adaptive_verification": 1}, "it must be true or false"),
        (
            {"synthetic_acceptance_length": 3},
            'synthetic_acceptance_length needs rejection_sample_method "synthetic"',
        ),
        (
            {"synthetic_acceptance_rates": [1, 1, 1, 0, 0]},
            "synthetic_acceptance_rates needs rejection_sample_method",
        ),
        (SYNTHETIC, "needs synthetic_acceptance_length or synthetic_acceptance_rates"),
        (
            SYNTHETIC | {"synthetic_acceptance_length": 0.9},
            "synthetic_acceptance_length is 0.9; it is the mean number",
        ),
        (SYNTHETIC | {"synthetic_acceptance_length": 6.01}, "1 to 6 (num_speculative_tokens + 1)"),
        (SYNTHETIC | {"synthetic_acceptance_length": 5, "num_speculative_tokens": 3}, "1 to 4"),
        (SYNTHETIC | {"synthetic_acceptance_length": float("nan")}, "synthetic_acceptance_length is nan"),
        (SYNTHETIC | {"synthetic_acceptance_length": float("inf")}, "synthetic_acceptance_length is inf"),
        (SYNTHETIC | {"synthetic_acceptance_length": True}, "it must be a number"),
        (SYNTHETIC | {"synthetic_acceptance_rates": 0.5}, "it must be a list of numbers"),
        (SYNTHETIC | {"synthetic_acceptance_rates": ["a"]}, "it must be a number"),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5]},
            "holds 2 rates; it needs one for each of 5 drafts",
        ),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5, 0.6, 0, 0]}, "they must not increase"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1.5, 1, 1, 0, 0]}, "rates lie in 0..1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1, 1, float("nan"), 0, 0]}, "rates lie in 0..1"),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [1, 1, 1, 0, 0], "synthetic_acceptance_length": 4},
            "are both given",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_length": 3, "enable_adaptive_verification": True},
            "enable_adaptive_verification cannot go with",
        ),
        ({RANGES: 3}, "it must be a list of [first batch size, last, drafts]"),
        ({RANGES: [[1, 2]]}, "it must be a list of [first batch size, last, drafts]"),
        ({RANGES: [[1, 2, 0.5]]}, "it must be an integer"),
        ({RANGES: [[4, 2, 1]]}, f"{RANGES} holds the range 4 to 2"),
        ({RANGES: [[0, 2, 1]]}, f"{RANGES} holds the range 0 to 2"),
        ({RANGES: [[1, 2, -1]]}, f"{RANGES} gives -1 drafts for 1 to 2; allowed are 0 or more"),
        ({RANGES: [[1, 2, 6]]}, f"{RANGES} gives 6 drafts for 1 to 2; allowed are 0 to 5"),
        ({RANGES: [[1, 2, 3]], "num_speculative_tokens": 2}, "allowed are 0 to 2"),
        ({RANGES: [[8, 20, 1], [1, 8, 3]]}, f"{RANGES} holds 1 to 8 and 8 to 20, which overlap"),
    ],
    ids=str,
)
def test_each_wrong_field_is_a_sentence(fields: dict, sentence: str) -> None:
    found = refusals(released(), **fields)
    assert len(found) == 1 and sentence in found[0]


@pytest.mark.parametrize("name", NOT_OURS)
def test_fields_of_vllm_that_mean_nothing_here(name: str) -> None:
    (problem,) = refusals(**{name: 2})
    assert problem.startswith(f"{name} is not an option here: ") and problem.endswith("; leave it out")


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods(method: str) -> None:
    (problem,) = refusals(method=method)
    assert "the checkpoint's own DSpark layers only" in problem


def test_all_problems_are_told_at_once() -> None:
    found = refusals(
        method="eagle",
        model="draft",
        num_speculative_tokens=0,
        rejection_sample_method="fly",
        synthetic_acceptance_rates=[0.1, 0.2],
        num_speculative_tokens_per_batch_size=[[3, 1, -1]],
    )
    assert len(found) == 7  # and none that only follows from another
    both = refusals(released(), **SYNTHETIC, num_speculative_tokens=6, synthetic_acceptance_rates=[0.5])
    assert len(both) == 1  # the text alone tells: one rate, six drafts


def test_a_checkpoint_without_a_draft() -> None:
    (problem,) = refusals(msgspec.structs.replace(released(), num_nextn_predict_layers=0))
    assert "the checkpoint has no draft" in problem


def test_options_travel_to_the_engine_process() -> None:
    for options in (
        parsed(**SYNTHETIC, synthetic_acceptance_length=3.5),
        parsed(draft_sample_method="probabilistic", num_speculative_tokens_per_batch_size=[[1, 2, 3]]),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=SpeculativeOptions) == options


@pytest.mark.parametrize(
    "text",
    [
        '{"synthetic_acceptance_length": ' + "9" * 400 + "}",
        '{"num_speculative_tokens": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
    ids=["no float holds it", "thousands of digits", "nested without end"],
)
def test_monstrous_json_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        SpeculativeOptions.parse(text)


def test_a_synthetic_length_and_fewer_drafts_are_refused() -> None:
    text = (
        '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5, '
        '"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}'
    )
    with pytest.raises(ConfigError, match="would not be met"):
        SpeculativeOptions.parse(text)


@settings(max_examples=300, deadline=None)
@given(text=texts([*SpeculativeOptions.__struct_fields__, *NOT_OURS]))
def test_any_text_is_options_or_refused_in_sentences(text: str) -> None:
    try:
        options = SpeculativeOptions.parse(text)
    except ConfigError as error:
        assert error.subject == "--speculative-config" and all(error.problems)
    else:
        assert isinstance(options, SpeculativeOptions)
