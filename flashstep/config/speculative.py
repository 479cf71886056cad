"""Speculation with the checkpoint's DSpark draft: what the user may say, and what it means for one model.

``SpeculativeOptions`` is ``--speculative-config``, a JSON object under vLLM's field names. ``speculation`` holds it against the
model and gives ``Speculation``, in which nothing is left open, or ``ConfigError`` with every wrong combination in a sentence.
"""

import enum
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.config.objects import read_object

METHOD = "dspark"
SUBJECT = "--speculative-config"

NOT_OURS = {  # fields of vLLM's that mean nothing here, and what holds instead
    "model": "the draft is part of the checkpoint (its mtp.* tensors)",
    "revision": "the draft is part of the checkpoint (its mtp.* tensors)",
    "tokenizer": "the draft shares the checkpoint's tokenizer",
    "quantization": "the checkpoint says how the draft is stored",
    "max_model_len": "the draft serves whatever --max-model-len allows",
    "draft_tensor_parallel_size": "the draft runs where the target runs",
    "moe_backend": "--kernels chooses for target and draft",
    "attention_backend": "--kernels chooses for target and draft",
    "kv_cache_dtype": "the draft keeps its records in the model's own format",
    "disable_padded_drafter_batch": "drafts are never padded",
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size says how many drafts are made at which batch size",
    "parallel_drafting": "DSpark always drafts its block at once",
    "prompt_lookup_max": "drafts come from the draft model, never from the prompt",
    "prompt_lookup_min": "drafts come from the draft model, never from the prompt",
    "enforce_eager": "--enforce-eager is for target and draft",
    "code_revision": "no code of a checkpoint is run",
    "tensor_parallel_size": "the draft runs where the target runs",
    "draft_load_config": "the draft is loaded with the checkpoint",
    "draft_lm_head_quantization": "the draft shares the target's head, as the checkpoint stores it",
    "index_share_for_mtp_iteration": "the draft layers have windows only, and select nothing",
    "disable_eagle_block_drop": "DSpark drops no block",
    "disable_lookahead_block_hashes": "drafts are never in the prefix cache",
    "use_local_argmax_reduction": "one GPU has the whole vocabulary",
    "use_heterogeneous_vocab": "the draft shares the checkpoint's vocabulary",
    "dspark_draft_topk": "drafts are drawn from the whole vocabulary",
    "xpress_topc": "drafts are drawn from the whole vocabulary",
    **dict.fromkeys(
        ("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
        "fly is lossy; block accepts more than standard",
    ),
    **dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "drafts come from the draft model, never from the prompt",
    ),
    "speculative_token_tree": "drafts are a chain, not a tree",
}
ONE_GPU = ("draft_tensor_parallel_size", "tensor_parallel_size")
OTHER_METHODS = ("eagle", "eagle3", "mtp", "deepseek_mtp", "ngram", "suffix", "medusa", "draft_model")


class DraftSampleMethod(enum.Enum):
    """How drafts are chosen: GREEDY takes the most probable (a point mass), PROBABILISTIC draws at the request's temperature."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


class RejectionSampleMethod(enum.Enum):
    """Which drafts stand (spec/model.md 8.6). STANDARD and BLOCK keep the target's distribution; SYNTHETIC does not."""

    STANDARD = "standard"
    BLOCK = "block"
    SYNTHETIC = "synthetic"


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of ``--speculative-config``; None is "not given".

    ``num_speculative_tokens`` is k, 1 to the draft's block size (the default). ``synthetic_acceptance_length`` is the mean number
    of tokens a step, 1 to k + 1; ``synthetic_acceptance_rates`` are k non-increasing unconditional rates instead.
    ``num_speculative_tokens_per_batch_size`` holds (first batch size, last, k); a size that no range names takes k.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: DraftSampleMethod = DraftSampleMethod.GREEDY
    rejection_sample_method: RejectionSampleMethod = RejectionSampleMethod.STANDARD
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    enable_adaptive_verification: bool = False
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SpeculativeOptions":
        """The options that the JSON object ``text`` holds, or ``ConfigError`` with everything that is wrong without a model."""
        fields, problems = read_object(text, example='{"num_speculative_tokens": 3}')
        values, unreadable = {}, []
        for name, value in fields.items():
            if name in ONE_GPU and value == 1 and not isinstance(value, bool):
                continue  # asks for what is so
            if name not in _READERS:
                problems.append(_stranger(name))
                continue
            try:
                values[name] = _READERS[name](value)
            except ValueError as error:
                unreadable.append(f"{name} is {json.dumps(value)}; {error}")
        options = cls(**values)
        problems += [*unreadable, *_value_problems(options, options.num_speculative_tokens)]
        if not unreadable:  # else a default stands where something was meant
            problems += _synthetic_problems(options)
        if problems:
            raise ConfigError(SUBJECT, problems)
        return options


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine does: at most ``num_tokens`` drafts a step.

    ``acceptance_rates`` are the unconditional rates of a synthetic run, one a draft, else empty. ``by_batch_size`` is as in the
    options.
    """

    num_tokens: int
    draft_sample_method: DraftSampleMethod = DraftSampleMethod.GREEDY
    rejection_sample_method: RejectionSampleMethod = RejectionSampleMethod.STANDARD
    acceptance_rates: tuple[float, ...] = ()
    adaptive: bool = False
    by_batch_size: tuple[tuple[int, int, int], ...] = ()

    @property
    def synthetic(self) -> bool:
        return self.rejection_sample_method is RejectionSampleMethod.SYNTHETIC

    def depth(self, batch_size: int) -> int:
        """Drafts a request, when ``batch_size`` requests decode."""
        for first, last, k in self.by_batch_size:
            if first <= batch_size <= last:
                return min(k, self.num_tokens)
        return self.num_tokens


def speculation(options: SpeculativeOptions, model: ModelConfig) -> Speculation:
    """What ``options`` mean for ``model``, or ``ConfigError``."""
    most = model.dspark_block_size
    num_tokens = most if options.num_speculative_tokens is None else options.num_speculative_tokens
    problems = [*_value_problems(options, num_tokens), *_synthetic_problems(options)]
    if model.num_nextn_predict_layers == 0:
        problems.append(
            "the checkpoint has no draft (num_nextn_predict_layers is 0); serve it without --speculative-config"
        )
    elif num_tokens > most:
        problems.append(
            f"num_speculative_tokens is {num_tokens}; this checkpoint's draft makes 1 to {most} (dspark_block_size)"
        )
    if problems:
        raise ConfigError(SUBJECT, problems)
    return Speculation(
        num_tokens=num_tokens,
        draft_sample_method=options.draft_sample_method,
        rejection_sample_method=options.rejection_sample_method,
        acceptance_rates=_rates(options, num_tokens),
        adaptive=options.enable_adaptive_verification,
        by_batch_size=options.num_speculative_tokens_per_batch_size,
    )


def _rates(options: SpeculativeOptions, num_tokens: int) -> tuple[float, ...]:
    """Unconditional rates: as given, or those of least variance with the given mean: ones, a fraction, zeros (serving.md B6)."""
    if options.synthetic_acceptance_rates is not None:
        return options.synthetic_acceptance_rates
    if options.synthetic_acceptance_length is None:
        return ()
    accepted = options.synthetic_acceptance_length - 1
    # rounded, so that 3.51 gives 0.51 and not 0.5099999999999998
    return tuple(min(1.0, max(0.0, round(accepted - place, 12))) for place in range(num_tokens))


# ---- what cannot be meant -------------------------------------------------------------------------------------------------


def _value_problems(options: SpeculativeOptions, num_tokens: int | None) -> list[str]:
    """Values out of range; ``num_tokens`` None: k is the checkpoint's, and not known yet."""
    known = num_tokens if num_tokens is None or num_tokens >= 1 else None
    return [
        *_token_count_problems(options),
        *_length_problems(options.synthetic_acceptance_length, known),
        *_rate_problems(options.synthetic_acceptance_rates, known),
        *_batch_size_problems(options.num_speculative_tokens_per_batch_size, known),
    ]


def _token_count_problems(options: SpeculativeOptions) -> list[str]:
    if options.num_speculative_tokens is None or options.num_speculative_tokens >= 1:
        return []
    return [
        f"num_speculative_tokens is {options.num_speculative_tokens}; it must be at least 1 "
        "(to decode without drafts leave out --speculative-config)"
    ]


def _synthetic_problems(options: SpeculativeOptions) -> list[str]:
    length, rates = options.synthetic_acceptance_length, options.synthetic_acceptance_rates
    given = [
        name
        for name, value in (
            ("synthetic_acceptance_length", length),
            ("synthetic_acceptance_rates", rates),
        )
        if value is not None
    ]
    if options.rejection_sample_method is not RejectionSampleMethod.SYNTHETIC:
        return [f'{name} needs rejection_sample_method "synthetic"' for name in given]
    problems = []
    if len(given) == 2:
        problems.append(
            "synthetic_acceptance_length and synthetic_acceptance_rates are both given; give one of them"
        )
    elif not given:
        problems.append(
            'rejection_sample_method "synthetic" needs synthetic_acceptance_length or synthetic_acceptance_rates'
        )
    if options.enable_adaptive_verification:
        problems.append(
            'enable_adaptive_verification cannot go with rejection_sample_method "synthetic": drafts that stand by lot '
            "do not follow the draft's confidence"
        )
    if options.num_speculative_tokens_per_batch_size:
        problems.append(
            'num_speculative_tokens_per_batch_size cannot go with rejection_sample_method "synthetic": with fewer drafts '
            "fewer stand, and the length that was asked for would not be met"
        )
    return problems


def _length_problems(length: float | None, num_tokens: int | None) -> list[str]:
    if length is None:
        return []
    most = math.inf if num_tokens is None else num_tokens + 1
    if math.isfinite(length) and 1 <= length <= most:
        return []
    limit = "k + 1" if num_tokens is None else f"{most} (num_speculative_tokens + 1)"
    return [f"synthetic_acceptance_length is {length}; it is the mean number of tokens a step, 1 to {limit}"]


def _rate_problems(rates: tuple[float, ...] | None, num_tokens: int | None) -> list[str]:
    if rates is None:
        return []
    shown = list(rates)
    problems = []
    if num_tokens is not None and len(rates) != num_tokens:
        problems.append(
            f"synthetic_acceptance_rates holds {len(rates)} rates; it needs one for each of {num_tokens} drafts"
        )
    if not all(0 <= rate <= 1 for rate in rates):  # nan is not
        problems.append(f"synthetic_acceptance_rates is {shown}; rates lie in 0..1")
    elif any(later > earlier for earlier, later in itertools.pairwise(rates)):
        problems.append(
            f"synthetic_acceptance_rates is {shown}; they must not increase, for a draft stands only if those before it do"
        )
    return problems


def _batch_size_problems(ranges: tuple[tuple[int, int, int], ...], num_tokens: int | None) -> list[str]:
    name = "num_speculative_tokens_per_batch_size"
    most = math.inf if num_tokens is None else num_tokens
    allowed = "0 or more" if num_tokens is None else f"0 to {num_tokens} (num_speculative_tokens)"
    problems = []
    for first, last, k in ranges:
        if not 1 <= first <= last:
            problems.append(
                f"{name} holds the range {first} to {last}; a range begins at 1 or later and ends at its beginning or later"
            )
        if not 0 <= k <= most:
            problems.append(f"{name} gives {k} drafts for {first} to {last}; allowed are {allowed}")
    ordered = sorted(span for span in ranges if span[0] <= span[1])
    problems += [
        f"{name} holds {before[0]} to {before[1]} and {after[0]} to {after[1]}, which overlap"
        for before, after in itertools.pairwise(ordered)
        if after[0] <= before[1]
    ]
    return problems


# ---- reading --------------------------------------------------------------------------------------------------------------


def _stranger(name: str) -> str:
    if name in NOT_OURS:
        return f"{name} is not an option here: {NOT_OURS[name]}; leave it out"
    return f"{name} is not a known field; known are {', '.join(_READERS)}"


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _method(value: Any) -> str:
    if value == METHOD:
        return METHOD
    if value in OTHER_METHODS:
        raise ValueError(
            f'flashstep drafts with the checkpoint\'s own DSpark layers only: say "{METHOD}" or leave it out'
        )
    raise ValueError(f'the only method is "{METHOD}", which may be left out')


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("it must be an integer")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("it must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("it must be a number that a float can hold") from error


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


def _numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of numbers")
    return tuple(_number(item) for item in value)


def _ranges(value: Any) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(value, list) or any(not isinstance(item, list) or len(item) != 3 for item in value):
        raise ValueError("it must be a list of [first batch size, last, drafts]")
    return tuple((_integer(first), _integer(last), _integer(k)) for first, last, k in value)


def _draft_sample_method(value: Any) -> DraftSampleMethod:
    words = {method.value: method for method in DraftSampleMethod}
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"allowed are {' and '.join(words)}")
    return words[value]


def _rejection_sample_method(value: Any) -> RejectionSampleMethod:
    words = {method.value: method for method in RejectionSampleMethod}
    if value == "fly":
        raise ValueError(
            "it changes the output's distribution; standard and block do not, and block accepts more"
        )
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"allowed are {', '.join(words)}")
    return words[value]


_READERS: dict[str, Callable[[Any], Any]] = {
    "method": _optional(_method),
    "num_speculative_tokens": _optional(_integer),
    "draft_sample_method": _draft_sample_method,
    "rejection_sample_method": _rejection_sample_method,
    "synthetic_acceptance_length": _optional(_number),
    "synthetic_acceptance_rates": _optional(_numbers),
    "enable_adaptive_verification": _truth,
    "num_speculative_tokens_per_batch_size": lambda value: () if value is None else _ranges(value),
}
