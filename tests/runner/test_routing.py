"""Expert routing for measurements: what is recorded is what experts were given, and what is replayed is what was recorded.

The witness hears what the experts op is called with, layer by layer, and knows nothing of taps.
"""

import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.errors import ConfigError
from flashstep.config.speculative import DraftSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.kernels import Ops, choose_ops
from flashstep.parallel.balance import part_loads, uniform
from flashstep.parallel.loads import Header, Loads, LoadsWriter, Moe, StepLoads, read
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import Built, build
from flashstep.runner.decode import Form
from flashstep.runner.sources import Recorded
from flashstep.weights.dummy import write_dummy
from tests.runner.conftest import write_tokenizer
from tests.runner.test_runner import prompt
from tests.weights.conftest import tiny_json

GREEDY = SpeculativeOptions()
DRAWN = SpeculativeOptions(draft_sample_method=DraftSampleMethod.PROBABILISTIC)  # its steps are the host's


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(dspark_block_size=5), seed=11)
    write_tokenizer(folder)
    return folder


class Witness:
    """Counts the pairs of each call of the experts op, as they are called: the target's layers in order, then the draft's."""

    def __init__(self, ops: Ops) -> None:
        self.calls: list[torch.Tensor] = []
        experts = ops.moe._loaded["experts"]

        def heard(*inputs: object, **options: torch.Tensor) -> torch.Tensor:
            self.calls.append(options["experts_TK"].clone())
            return experts(*inputs, **options)

        ops.moe._loaded["experts"] = heard


@pytest.fixture(scope="module")
def make(drafting: Path) -> Callable[..., tuple[Built, Witness]]:
    def made(**options: object) -> tuple[Built, Witness]:
        defaults = {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 40,
            "max_model_len": 128,
            "block_size": 4,
            "kv_cache_memory_bytes": 8 << 20,
            "enable_prefix_caching": False,
        }
        ops = choose_ops(torch.device("cpu"), kernels="reference")
        witness = Witness(ops)
        return build(EngineConfig(model=drafting, **(defaults | options)), ops=ops), witness

    return made


def run(built: Built, *, seed: int = 0) -> dict[str, list[int]]:
    """Some requests of several lengths, the first chunked; the tokens of each."""
    engine = Engine(built.runner, seed=0)
    order = random.Random(seed)
    requests = [
        Request(
            id=f"r{n}",
            prompt=tuple(prompt(length, seed=seed)),
            params=SamplingParams(max_tokens=order.randint(3, 12), seed=n, ignore_eos=True),
        )
        for n, length in enumerate((70, 3, 20, 9))
    ]
    outputs = engine.generate(requests)
    return {name: [token for one in told for token in one.tokens] for name, told in outputs.items()}


def heard(witness: Witness, loads: Loads) -> int:
    """Assert that ``loads`` are what the witness heard, step by step, and tell how many steps had no row besides.

    A step that the device decides by itself also runs rows of drafts that are none: these are heard, and not recorded.
    """
    calls = iter(witness.calls)

    def counts(moe: Moe) -> np.ndarray:
        chosen = [next(calls) for _ in range(moe.layers)]
        return np.array([np.bincount(one.flatten().numpy(), minlength=moe.experts) for one in chosen])

    header, whole = loads.header, 0
    for step in loads.steps:
        told = counts(header.target)
        assert (told >= step.target).all(), step.step
        assert step.rows * header.target.chosen == step.target.sum(1).max()
        equal = bool((told == step.target).all())
        assert equal or told.sum() > step.target.sum()
        if step.draft is not None:
            assert header.draft is not None and (counts(header.draft) >= step.draft).all(), step.step
        whole += equal
    assert next(calls, None) is None, "something ran that was not recorded"
    return whole


@pytest.mark.parametrize("routing", ["real", "uniform"])
@pytest.mark.parametrize("speculative", [None, GREEDY, DRAWN], ids=["plain", "greedy", "drawn"])
def test_what_is_recorded_is_what_experts_got(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path, speculative: SpeculativeOptions, routing: str
) -> None:
    built, witness = make(record_expert_loads=tmp_path / "loads", speculative=speculative, routing=routing)
    witness.calls.clear()  # what was measured while building
    run(built)
    loads = read(tmp_path / "loads")
    whole = heard(witness, loads)
    assert whole > 3 if speculative is GREEDY else whole == len(loads.steps)
    assert len(loads.steps) > 8 and loads.header.routing == routing and not loads.cut
    assert (speculative is not None) == any(step.draft is not None for step in loads.steps)


def test_recording_changes_no_token(make: Callable[..., tuple[Built, Witness]], tmp_path: Path) -> None:
    recorded = run(make(record_expert_loads=tmp_path / "loads", speculative=GREEDY)[0])
    assert recorded == run(make(speculative=GREEDY)[0])
    assert recorded != run(make(speculative=GREEDY, routing="uniform")[0]), "other experts, other tokens"


def test_rows_that_pad_a_step_are_not_recorded(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path
) -> None:
    """As a graph would pad them; requests that have no room left, and drafts that are none, pad too."""
    plain, padded = tmp_path / "plain", tmp_path / "padded"
    run(make(record_expert_loads=plain, speculative=GREEDY)[0])
    built, witness = make(record_expert_loads=padded, speculative=GREEDY)
    decode = built.runner.decode
    assert decode is not None
    decode.form = lambda requests, *, verified, proposed, cuts: Form(6, 5, proposed, cuts)
    run(built)
    steps, others = read(plain).steps, read(padded).steps
    assert len(steps) == len(others) and any(len(call) == 36 for call in witness.calls)
    for one, other in zip(steps, others, strict=True):
        assert (one.target == other.target).all() and one.rows == other.rows
        assert (one.draft is None) == (other.draft is None)
        assert one.draft is None or (one.draft == other.draft).all()


@pytest.mark.parametrize("speculative", [None, DRAWN], ids=["plain", "drawn"])
def test_uniform_loads_are_those_of_the_plan(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path, speculative: SpeculativeOptions
) -> None:
    """Steps are not padded here, so rows tell the loads that were worked out for them."""
    built, _ = make(
        record_expert_loads=tmp_path / "loads", speculative=speculative, routing="uniform", seed=9
    )
    run(built)
    loads = read(tmp_path / "loads")
    target = loads.header.target
    for number, step in enumerate(loads.steps):
        wanted = uniform(
            rows=step.rows, layers=target.layers, experts=target.experts, chosen=target.chosen,
            seed=(9, number % 64, step.rows),
        )  # fmt: skip
        assert (step.target == wanted).all()


@pytest.mark.parametrize("speculative", [None, GREEDY], ids=["plain", "greedy"])
def test_recorded_loads_are_replayed(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path, speculative: SpeculativeOptions
) -> None:
    """The same requests without speculation make the same steps, so the loads come out as they were recorded."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(make(record_expert_loads=first, speculative=speculative)[0])
    built, witness = make(
        record_expert_loads=second, speculative=speculative, routing="recorded", expert_loads=first
    )
    witness.calls.clear()
    run(built)
    told, again = read(first), read(second)
    assert heard(witness, again) > 3
    assert again.header.routing == "recorded"
    if speculative is None:
        for one, other in zip(told.steps, again.steps, strict=True):
            assert one.rows == other.rows and (one.target == other.target).all()
    replayed = built.runner.routing.replayed
    assert replayed is not None and replayed.doubt is None
    if speculative is None:
        assert set(replayed.worked_out) == {"equal"}


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_recorded_loads_of_other_rows_invent_no_skew(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path, rows: int
) -> None:
    """Recorded at 4 rows a step and replayed at fewer and more: all parts' shares are those of the recording."""
    file = tmp_path / "loads"
    moe = Moe(4, 16, 2)
    writer = LoadsWriter(file, Header(model="m", target=moe, draft=None, layout="whole", routing="real"))
    chance = np.random.default_rng(1)
    for number in range(40):
        chosen = [[chance.permutation(16)[:2] for _ in range(4)] for _ in range(4)]
        counts_LE = np.array([np.bincount(np.concatenate(layer), minlength=16) for layer in chosen])
        writer.write(StepLoads(number, 4, counts_LE, None))
    steps = read(file).steps
    source = Recorded(moe, lambda number: steps[number].target, period=40, seed=0)
    found = [source.loads(number, rows, slice(0, 4)) for number in range(40)]
    shares_P = part_loads(np.sum(found, axis=0), parts=8).sum(0) / (40 * 4 * rows * 2)
    assert np.abs(shares_P - 1 / 8).max() < 0.04
    touched = np.mean([(counts_LE > 0).sum(1).mean() for counts_LE in found])
    assert touched == pytest.approx(16 * (1 - (1 - 2 / 16) ** rows), rel=0.05)
    assert source.doubt is None and set(source.worked_out) == {"added" if rows == 12 else "drawn"}


def test_too_few_recorded_rows_are_repeated_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    counts_LE = np.array([[2, 2, 0, 0]])
    source = Recorded(Moe(1, 4, 2), lambda _: counts_LE, period=3, seed=0)
    assert source.loads(0, 12, slice(0, 1)).tolist() == [[12, 12, 0, 0]]
    assert (
        source.doubt is not None and "12 rows has the loads of 3 recorded steps with 6 rows" in source.doubt
    )
    assert source.worked_out == {"repeated": 1}


def test_a_full_disk_ends_the_recording_and_nothing_else(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path
) -> None:
    file = tmp_path / "loads"
    built, _ = make(record_expert_loads=file)
    wanted = run(make()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 700, hard))
        assert run(built) == wanted
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    loads = read(file)
    assert 0 < len(list(loads.steps)) < built.runner.routing.steps and not loads.cut
    assert built.runner.balancedness is not None
    with pytest.raises(ConfigError, match="/dev/full: No space left"):
        make(record_expert_loads=Path("/dev/full"))


def test_rows_that_stop_at_the_last_source_leave_loads_exact(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path
) -> None:
    """Bounded replay: layers past the last KV source have fewer rows, and loads for these."""
    built, witness = make(
        record_expert_loads=tmp_path / "loads", routing="uniform", hit_policy=HitPolicy.BOUNDED
    )
    witness.calls.clear()
    run(built)
    loads = read(tmp_path / "loads")
    chosen, fewer = loads.header.target.chosen, 0
    calls = iter(witness.calls)
    for step in loads.steps:
        for counts_E in step.target:
            if not counts_E.any():
                fewer += 1
                continue
            experts_TK = next(calls)
            assert (np.bincount(experts_TK.flatten().numpy(), minlength=len(counts_E)) == counts_E).all()
            assert (experts_TK.diff(dim=1) > 0).all(), "no row has an expert twice"
            assert np.ptp(counts_E[counts_E > 0]) <= 1
            fewer += int(counts_E.sum()) < step.rows * chosen
    assert fewer, "no layer had fewer rows"


def test_a_prompt_of_many_tiles_is_counted_whole(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU runs the layers on some rows at a time: each tile has its own rows' experts."""
    monkeypatch.setattr("flashstep.model.block.TILE_ROWS", 7)
    built, witness = make(record_expert_loads=tmp_path / "loads", routing="uniform")
    witness.calls.clear()
    run(built)
    loads = read(tmp_path / "loads")
    assert max(len(call) for call in witness.calls) == 7
    for number, step in enumerate(loads.steps):
        wanted = uniform(
            rows=step.rows, layers=loads.header.target.layers, experts=loads.header.target.experts,
            chosen=loads.header.target.chosen, seed=(0, number % 64, step.rows),
        )  # fmt: skip
        assert (step.target == wanted).all()


def test_a_file_of_another_model_is_refused(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path
) -> None:
    file = tmp_path / "loads"
    run(make(record_expert_loads=file)[0])
    with pytest.raises(ConfigError, match="has loads of none; its draft has 3 layers"):
        make(routing="recorded", expert_loads=file, speculative=GREEDY)
    file.write_bytes(file.read_bytes().replace(b'"chosen":2', b'"chosen":3', 1))
    with pytest.raises(ConfigError, match="choose 3 experts each"):
        make(routing="recorded", expert_loads=file)
    (tmp_path / "empty").write_bytes(
        file.read_bytes().split(b"\n")[0].replace(b'"chosen":3', b'"chosen":2') + b"\n"
    )
    with pytest.raises(ConfigError, match="has no step"):
        make(routing="recorded", expert_loads=tmp_path / "empty")


def test_an_emulated_rank_is_told_the_whole_models_experts(
    make: Callable[..., tuple[Built, Witness]], tmp_path: Path
) -> None:
    built, witness = make(
        record_expert_loads=tmp_path / "loads", routing="uniform", emulate="dep2:1", load_format="dummy"
    )
    witness.calls.clear()
    run(built)
    loads = read(tmp_path / "loads")
    moe = loads.header.target
    assert loads.header.layout == "dep2:1" and moe.experts == built.config.n_routed_experts
    local = max(int(call.max()) for call in witness.calls)
    assert local < moe.experts // 2 + 2, "the rank runs its own experts"
    assert all((step.target.sum(1) == step.rows * moe.chosen).all() for step in loads.steps)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ["real", "uniform", "recorded"])
def test_graphs_do_what_launches_do(drafting: Path, tmp_path: Path, routing: str) -> None:
    """A replayed step has the experts that were queued before it, and counts them anew."""
    told = {}
    for name in ("first", "eager", "graphs"):
        config = EngineConfig(
            model=drafting, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=128, block_size=4,
            kv_cache_memory_bytes=8 << 20, enable_prefix_caching=False, speculative=GREEDY, device="cuda",
            batch_invariant=True, enforce_eager=name != "graphs", record_expert_loads=tmp_path / name,
            routing="real" if name == "first" else routing,
            expert_loads=tmp_path / "first" if name != "first" and routing == "recorded" else None,
        )  # fmt: skip
        told[name] = run(build(config))
    assert told["eager"] == told["graphs"]
    one, other = read(tmp_path / "eager").steps, read(tmp_path / "graphs").steps
    assert len(one) == len(other) and all(
        (a.target == b.target).all() for a, b in zip(one, other, strict=True)
    )
