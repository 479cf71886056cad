"""The command line: help, refusals with near matches, plans, and commands that run the engine in process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashstep.cli import check, main
from flashstep.cli.model import resolve, served_name, tiny_model
from flashstep.weights.dummy import write_dummy

COMMANDS = ("serve", "generate", "chat", "check", "budget", "kernels", "bench")
SMALL = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20), "--max-model-len", "512")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the tiny model's shape, as files."""
    import json

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cli") / "random"
    write_dummy(folder, json.loads((tiny_model() / "config.json").read_text()), seed=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model() / name, folder / name)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: flashstep {command}" in capsys.readouterr().out


def test_serve_has_vllms_flag_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for flag in (
        "--host --port --served-model-name --max-model-len --max-num-seqs --max-num-batched-tokens --block-size "
        "--kv-cache-memory-bytes --num-gpu-blocks-override --enable-prefix-caching --no-enable-prefix-caching "
        "--scheduling-policy --load-format --seed --long-prefill-token-threshold --uvicorn-log-level "
        "--prefix-hit-policy --engram-config --numa-bind --kernels --speculative-config --per-request-spec-decode-metrics"
    ).split():
        assert flag in shown


def test_an_unknown_flag_names_near_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-num-seq", "3"]) == 2
    assert "near to it are --max-num-seqs" in capsys.readouterr().err
    assert "--max-num-seqs" in refused(capsys, "generate", "--max-num-seq", "3")


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refused(capsys, "server")
    assert all(command in shown for command in COMMANDS)


def test_a_value_of_the_wrong_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-num-seqs" in refused(capsys, "generate", "x", "--max-num-seqs", "many")
    assert main(["serve", "--max-num-seqs", "many"]) == 2
    assert "--max-num-seqs is 'many'; it must be a whole number" in capsys.readouterr().err


def test_all_bad_values_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--block-size", "3", "--port", "-2", "--max-num-seqs", "0"]) == 2
    shown = capsys.readouterr().err
    assert "3 problem(s)" in shown and "--block-size is 3" in shown and "--port is -2" in shown


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "check", "budget"])
def test_a_bad_speculation_is_told_with_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--block-size", "3", "--speculative-config", '{"method": "eagle", "tree": 1}']) == 2
    shown = capsys.readouterr().err
    assert "3 problem(s)" in shown and "--block-size is 3" in shown
    assert shown.count("- --speculative-config: ") == 2


def test_per_step_lists_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--per-request-spec-decode-metrics", "detailed"]) == 2
    assert "it must be none, summary" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "it is no folder" in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "it has no config.json" in shown and "it has no tokenizer.json" in shown


def test_names_and_places() -> None:
    assert resolve(None) == tiny_model()
    assert served_name(None, tiny_model()) == "flashstep-tiny"
    assert served_name(Path("/models/V4.1"), Path("/models/V4.1")) == "V4.1"


def test_budget_of_the_released_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--released"]) == 0
    shown = capsys.readouterr().out
    assert "890 bytes a token = (288 compressed + 68 index keys = 356) x (1/2 + 1/2 + 1/2 + 1)" in shown
    assert "528 x 40 layers" in shown


def test_budget_of_the_tiny_model_and_of_a_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget"]) == 0
    tiny = capsys.readouterr().out
    assert main(["budget", str(tiny_model() / "config.json")]) == 0
    assert capsys.readouterr().out == tiny and "bytes a token" in tiny


def test_budget_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--released", "--max-model-len", "1000000"]) == 2
    assert "kv_cache_memory_bytes" in capsys.readouterr().err


def test_budget_of_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--released"]) == 0
    without = capsys.readouterr().out
    assert main(["budget", "--released", "--speculative-config", "{}"]) == 0
    shown = capsys.readouterr().out
    assert "The drafter is not loaded" in without and "The drafter is loaded" in shown
    assert "528 x 43 layers, 3 of them the drafter's" in shown
    assert main(["budget", "--released", "--speculative-config", '{"num_speculative_tokens": 6}']) == 2
    assert "num_speculative_tokens is 6" in capsys.readouterr().err


def test_budget_of_a_rank_on_a_gpu_of_a_given_size(capsys: pytest.CaptureFixture[str]) -> None:
    rank = ("budget", "--released", "--load-format", "dummy", "--emulate", "tp4:0")
    assert main([*rank, "--device-memory-bytes", str(139 * 10**9)]) == 0
    told = capsys.readouterr().out
    assert "weights: routed experts" in told and "It fits." in told
    assert main([*rank, "--device-memory-bytes", str(60 * 10**9)]) == 0
    assert "It does not fit: " in capsys.readouterr().out


def test_bench_forward_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = tmp_path / "forward.json", tmp_path / "forward.trace"
    options = (
        "--repeats",
        "2",
        "--json",
        str(file),
        "--trace",
        str(trace),
        "--load-format",
        "dummy",
        "--emulate",
        "dep4:1",
    )
    assert main(["bench", "forward", "2*6@40", "30@20c", *options]) == 0
    told = capsys.readouterr().out
    assert "dep4:1" in told and "excluded: dispatch of rows" in told and "2*6@40:5: " in told
    assert '"1*30@20c"' in file.read_text() and "traceEvents" in trace.read_text()
    assert main(["bench", "forward", "six"]) == 2
    assert "it is written [N*]Q[@K][c][:D]" in capsys.readouterr().err
    assert main(["bench", "forward", "--released", "--device", "cpu"]) == 2, "it fits no machine's memory"


def test_bench_latency_tells_percentiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    few = ("--input-len", "5", "--output-len", "4", "--num-iters", "1", "--num-iters-warmup", "0")
    assert main(["bench", "latency", *few, "--output-json", str(file)]) == 0
    assert "P99" in capsys.readouterr().out and '"steps_us"' in file.read_text()
    assert main(["bench", "latency", "--output-len", "1"]) == 2
    assert "--output-len is 1; it must be at least 2" in capsys.readouterr().err


def test_what_a_bench_cannot_write_is_told_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "missing" / "file")
    assert main(["bench", "forward", "--json", nowhere, "--trace", nowhere]) == 2
    told = capsys.readouterr().err
    assert "--json is" in told and "--trace is" in told and "there is no folder" in told
    assert main(["bench", "latency", "--output-json", nowhere]) == 2
    assert main(["bench", "forward", "--device", "cpu", "--svg", str(tmp_path / "a.svg")]) == 2
    assert "--svg draws the parts" in capsys.readouterr().err


def test_an_emulated_rank_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--emulate", "tp2:0", "--load-format", "dummy"]) == 2
    assert "bench latency" in capsys.readouterr().err


def test_emulation_needs_dummy_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--emulate", "tp2:0"]) == 2
    assert "say --load-format dummy too" in capsys.readouterr().err


def test_kernels_prints_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    from flashstep.kernels import TABLE

    assert main(["kernels"]) == 0
    shown = capsys.readouterr().out
    assert all(row.op in shown for row in TABLE)
    assert main(["kernels", "--kernels", "reference:gemm.none"]) == 2


def test_generate_is_repeatable_and_batches(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(checkpoint), "--max-tokens", "6", "--ignore-eos", *SMALL]
    assert main([*arguments, "one two"]) == 0
    alone = capsys.readouterr().out
    assert main([*arguments, "one two", "three"]) == 0
    together = capsys.readouterr().out
    assert alone.strip() and together.startswith(alone.rstrip("\n"))


def test_generate_reads_standard_input(checkpoint: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "flashstep",
        "generate",
        "--model",
        str(checkpoint),
        "--max-tokens",
        "3",
        *SMALL,
    ]
    done = subprocess.run(command, input="one two\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "there is no prompt" in done.stderr


def test_a_prompt_that_is_too_long(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(checkpoint), *SMALL, "word " * 600]) == 2
    assert "the context length is 512" in capsys.readouterr().err


def test_chat_in_process(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "flashstep", "chat", str(checkpoint), "--max-tokens", "5", *SMALL]
    done = subprocess.run(command, input="hello\nand again\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_chat_takes_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "somewhere", "--url", "http://127.0.0.1:1"]) == 2
    assert main(["chat", "--url", "127.0.0.1:1"]) == 2
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_check_compares_with_the_oracle(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LONGEST", 66)
    monkeypatch.setattr(check, "SEQUENCES", 1)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["check", str(checkpoint), *SMALL]) == 0, capsys.readouterr()
    assert "all equal bit for bit" in capsys.readouterr().out
    true = check.oracle_tensors

    def wrong(folder: Path, ids: list[int], **options: object) -> dict[str, torch.Tensor]:
        found = true(folder, ids, **options)
        found["logits"][-1] += torch.linspace(0, 1, found["logits"].shape[1])
        return found

    monkeypatch.setattr(check, "oracle_tensors", wrong)
    assert main(["check", str(checkpoint), *SMALL]) == 1
    assert "1 differ" in capsys.readouterr().out


def test_check_needs_weights_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--load-format", "dummy"]) == 2
    assert "--load-format dummy" in capsys.readouterr().err


def test_check_lists_everything_wrong(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (broken / name).symlink_to(checkpoint / name)
    assert main(["check", str(broken)]) == 2
    shown = capsys.readouterr().err
    assert "embed.weight is missing" in shown and "head.weight is missing" in shown
