"""What is asked of a bench is kept to; a budget for no GPU is refused by flag."""

import pytest

from flashstep.bench.forward import measure
from flashstep.cli import main
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig


def test_fewer_repeats_than_usual_are_kept_to() -> None:
    report = measure(EngineConfig(model=tiny_model()), ("1*1@8:0",), repeats=1)
    assert len(report.cases[0].samples_us) == 1


@pytest.mark.parametrize("rest", [("-5",), ("0",), ("1000000000", "--device", "cpu")])
def test_a_budget_for_no_gpu_is_refused(rest: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--device-memory-bytes", *rest]) == 2
    assert "--device-memory-bytes" in capsys.readouterr().err


def test_what_a_bench_decides_itself_is_not_taken_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--max-num-seqs", "7", "--no-enable-prefix-caching")
    for bench in ("forward", "latency"):
        assert main(["bench", bench, *given]) == 2
        told = capsys.readouterr().err
        assert "--max-num-seqs, --enable-prefix-caching: what is measured decides that" in told
    assert main(["bench", "forward", "--enforce-eager"]) == 2
    assert main(["bench", "latency", "--input-len", "99999999"]) == 2
    assert "the model's positions end at" in capsys.readouterr().err
