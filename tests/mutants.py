"""Broken parts, as patches: each mutation of spec/model.md 13 (x), and some more, for the oracle and for the serving side.

``python -m tests.mutants SIDE [NAME]`` breaks one part in its own process and runs the side's fast tests;
``tests/mutations.py`` does so for all of them, ``tests/test_mutations.py`` applies them one by one in process.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashstep.model.transformer as serving_transformer
from flashstep.kernels.attention import reference as attention
from flashstep.kernels.cast import reference as cast
from flashstep.kernels.engram import reference as engram
from flashstep.kernels.indexer import reference as indexer
from flashstep.kernels.mhc import reference as mhc
from flashstep.kernels.moe import reference as moe
from flashstep.model.indexer import CandidateIndexer, Indexer, WithinIndexer
from flashstep.quant import mxfp4, nvfp4
from oracle import model as oracle

Patch = Callable[[Any, str, Any], None]  # setattr, or pytest's monkeypatch.setattr

TESTS = {
    "oracle": ["tests/oracle", "tests/model/test_transformer.py"],
    "serving": ["tests/model/test_transformer.py"],
}
SELECT = {
    "oracle": "bit_for_bit or golden_ or clamp or (each_layer and a_base) or (test_every_length_in_one_batch and A)",
    "serving": "test_every_length_in_one_batch and (A or D)",
}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One broken part, as the oracle's and as the serving side's patch."""

    name: str
    oracle: Callable[[Patch], None]
    serving: Callable[[Patch], None]


# ---- the oracle -----------------------------------------------------------------------------------------------------


def use(patch: Patch, **functions: Any) -> None:
    """Let every forward of the oracle use these functions instead of its own."""
    forward = oracle.forward

    def mutated(*arguments: Any, options: oracle.Options = oracle.Options(), **more: Any) -> Any:  # noqa: B008
        changed = replace(options, functions=replace(options.functions, **functions))
        return forward(*arguments, options=changed, **more)

    patch(oracle, "forward", mutated)


def unchanged(x: Tensor) -> Tensor:
    return x


def oracle_no_sink(patch: Patch) -> None:
    attend = oracle.attend
    use(
        patch,
        attend=lambda call: attend(replace(call, sink_H=torch.full_like(call.sink_H, -math.inf))),
    )


def oracle_wide_window(patch: Patch) -> None:
    attend = oracle.attend
    use(patch, attend=lambda call: attend(replace(call, window=call.window + 1)))


def oracle_own_pre(patch: Patch) -> None:
    latest: list[Tensor] = []

    def coefficients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = oracle.hc_coefficients(*arguments)
        latest[:] = [found[0]]
        return found

    def collapse(streams: Tensor, read: Tensor, numerics: oracle.Numerics) -> Tensor:
        return oracle.collapse(streams, latest[0], numerics)

    use(patch, hc_coefficients=coefficients, collapse=collapse)


def oracle_transposed(patch: Patch) -> None:
    def write(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor, numerics: oracle.Numerics) -> Tensor:
        return oracle.write_streams(y, streams, post, mix.mT, numerics)

    use(patch, write_streams=write)


def oracle_no_yarn(patch: Patch) -> None:
    frequencies = oracle.rope_frequencies

    def plain(config: Any, *, compressed: bool) -> Tensor:
        if not compressed:
            return frequencies(config, compressed=False)
        return plain_frequencies(config)

    patch(oracle, "rope_frequencies", plain)


def plain_frequencies(config: Any) -> Tensor:
    pair = torch.arange(config.qk_rope_head_dim // 2, dtype=torch.float64)
    return (config.compress_rope_theta ** (-2 * pair / config.qk_rope_head_dim)).float()


def oracle_no_clamp(patch: Patch) -> None:
    swiglu = oracle.swiglu

    def free(gate: Tensor, up: Tensor, limit: float, *more: Any) -> Tensor:
        return swiglu(gate, up, math.inf, *more)

    patch(oracle, "swiglu", free)


def oracle_no_candidates(patch: Patch) -> None:
    def everything(scores: Tensor, newest: Tensor, config: Any) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool)

    use(patch, candidate_mask=everything)


# ---- the serving side -----------------------------------------------------------------------------------------------


def wrap(patch: Patch, module: Any, names: tuple[str, ...], **changes: Callable[[Any], Any]) -> None:
    """Change keyword arguments on their way into functions of a module."""
    for name in names:
        original = getattr(module, name)

        def mutated(*arguments: Any, original: Callable[..., Any] = original, **more: Any) -> Any:
            return original(
                *arguments, **{**more, **{key: change(more[key]) for key, change in changes.items()}}
            )

        patch(module, name, mutated)


ATTEND = ("attend_window", "attend_sparse")


def serving_no_inverse(patch: Patch) -> None:
    patch(attention, "rotate_inverse", lambda x, cos_TP, sin_TP: x)


def serving_own_pre(patch: Patch) -> None:
    enter = mhc.enter
    patch(
        mhc,
        "enter",
        lambda x, pre, site, *, mean: enter(x, mhc.coefficients(x, site)[:, : x.shape[1]], site, mean=mean),
    )


def serving_transposed(patch: Patch) -> None:
    write = mhc.write

    def mutated(y: Tensor, x: Tensor, coefficients: Tensor) -> Tensor:
        streams = x.shape[1]
        comb = coefficients[:, 2 * streams :].unflatten(1, (streams, streams)).mT.flatten(1)
        return write(y, x, torch.cat((coefficients[:, : 2 * streams], comb), dim=1))

    patch(mhc, "write", mutated)


def serving_store(patch: Patch, name: str, first: Callable[[Tensor], Tensor]) -> None:
    """Records stay records, so a dropped quantiser is a wrong grid before the right one."""
    store = getattr(cast, name)
    patch(cast, name, lambda x, planes, *, slot_T: store(first(x), planes, slot_T=slot_T))


def serving_topk(patch: Patch) -> None:
    for kind in (Indexer, CandidateIndexer, WithinIndexer):
        build = kind.__init__

        def mutated(self: Any, *arguments: Any, build: Callable[..., None] = build, **more: Any) -> None:
            build(self, *arguments, **more)
            self._count += 1

        patch(kind, "__init__", mutated)


def serving_no_yarn(patch: Patch) -> None:
    patch(serving_transformer, "compressed_frequencies", plain_frequencies)


def serving_no_candidates(patch: Patch) -> None:
    select = indexer.select

    def within(*arguments: Any, candidates_TM: Tensor, block_size: int, **more: Any) -> Tensor:
        return select(*arguments, **more)

    patch(indexer, "select_within", within)


def serving_no_clamp(patch: Patch) -> None:
    wrap(patch, moe, ("swiglu", "experts"), limit=lambda limit: math.inf)


MUTATIONS = (
    Mutation(
        name="no sink",
        oracle=oracle_no_sink,
        serving=lambda patch: wrap(
            patch, attention, ATTEND, sink_H=lambda sink: torch.full_like(sink, -math.inf)
        ),
    ),
    Mutation(
        name="no inverse rotation",
        oracle=lambda patch: use(
            patch, inverse=lambda table: (torch.ones_like(table[0]), torch.zeros_like(table[1]))
        ),
        serving=serving_no_inverse,
    ),
    Mutation(name="mHC reads its own pre", oracle=oracle_own_pre, serving=serving_own_pre),
    Mutation(
        name="mHC mix transposed",
        oracle=oracle_transposed,
        serving=serving_transposed,
    ),
    Mutation(
        name="no Q8 on the window",
        oracle=lambda patch: use(patch, q8_window=unchanged),
        serving=lambda patch: serving_store(patch, "store_mxfp8", mxfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QN4 on entries",
        oracle=lambda patch: use(patch, qn4_entries=unchanged),
        serving=lambda patch: serving_store(patch, "store_nvfp4", mxfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QM4 on index keys and queries",
        oracle=lambda patch: use(patch, qm4_index=unchanged),
        serving=lambda patch: serving_store(patch, "store_mxfp4", nvfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QM4 on index queries",
        oracle=lambda patch: use(patch, qm4_index=lambda x: x if x.dim() == 4 else oracle.qm4(x)),
        serving=lambda patch: patch(cast, "round_mxfp4", unchanged),
    ),
    Mutation(
        name="window of one more",
        oracle=oracle_wide_window,
        serving=lambda patch: wrap(patch, attention, ATTEND, width=lambda width: width + 1),
    ),
    Mutation(
        name="top-k of one more",
        oracle=lambda patch: use(patch, select_topk=lambda scores, k: oracle.select_topk(scores, k + 1)),
        serving=serving_topk,
    ),
    Mutation(name="no YaRN", oracle=oracle_no_yarn, serving=serving_no_yarn),
    Mutation(name="no candidates", oracle=oracle_no_candidates, serving=serving_no_candidates),
    Mutation(name="no clamp", oracle=oracle_no_clamp, serving=serving_no_clamp),
    Mutation(
        name="no Engram",
        oracle=lambda patch: use(patch, engram_inject=lambda streams, *more: streams),
        serving=lambda patch: patch(engram, "inject", lambda x, kv, **more: x),
    ),
)


# ---- running --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Break the named part (none: nothing) and run the fast tests of its side; pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=sorted(TESTS))
    parser.add_argument("name", nargs="?", choices=[m.name for m in MUTATIONS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for mutation in MUTATIONS:
        if mutation.name == options.name:
            getattr(mutation, options.side)(setattr)
    quiet = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    return pytest.main([*quiet, "-k", SELECT[options.side], *TESTS[options.side]])


if __name__ == "__main__":
    sys.exit(main())
