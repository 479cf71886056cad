"""The file of expert loads: what goes in comes out, however its writing ended."""

import resource
import signal
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashstep.parallel.loads import Header, LoadsError, LoadsWriter, Moe, StepLoads, read

HEADER = Header(model="tiny", target=Moe(3, 8, 2), draft=Moe(2, 4, 1), layout="dep4:1", routing="real")


def counts(moe: Moe, rows: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    chosen = [
        [chance.choice(moe.experts, moe.chosen, replace=False) for _ in range(rows)]
        for _ in range(moe.layers)
    ]
    return np.array([np.bincount(np.concatenate(layer), minlength=moe.experts) for layer in chosen])


def write(path: Path, steps: int) -> list[StepLoads]:
    writer = LoadsWriter(path, HEADER)
    written = []
    for step in range(steps):
        draft = counts(HEADER.draft, step + 1, step) if step % 2 else None
        written.append(StepLoads(step, step + 1, counts(HEADER.target, step + 1, step), draft))
        writer.write(written[-1])
    return written  # not closed: each line is in the file when it was written


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = write(tmp_path / "loads", 6)
    loads = read(tmp_path / "loads")
    assert loads.header == HEADER and not loads.cut and len(loads.steps) == 6
    for mine, theirs in zip(written, loads.steps, strict=True):
        assert mine[:2] == theirs[:2] and (mine.target == theirs.target).all()
        assert (mine.draft is None) == (theirs.draft is None)
        assert mine.draft is None or (mine.draft == theirs.draft).all()


def test_a_killed_writer_leaves_all_whole_lines(tmp_path: Path) -> None:
    write(tmp_path / "loads", 4)
    whole = (tmp_path / "loads").read_bytes()
    (tmp_path / "loads").write_bytes(whole[:-5])
    loads = read(tmp_path / "loads")
    assert loads.cut and [item.step for item in loads.steps] == [0, 1, 2]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda lines: [b"{}", *lines[1:]], "line 1"),
        (lambda lines: [lines[0].replace(b'"format":1', b'"format":9'), *lines[1:]], "format 9"),
        (lambda lines: [lines[0], b"nonsense", lines[2]], "line 2"),
        (lambda lines: [lines[0].replace(b"[3,8,2]", b"[3,9,2]"), *lines[1:]], "line 2.*24 counts"),
        (lambda lines: [lines[0].replace(b"[3,8,2]", b"[3,8,5]"), *lines[1:]], "choose 5 experts"),
    ],
)
def test_what_is_no_file_of_loads_is_told_by_line(tmp_path: Path, broken, sentence: str) -> None:
    write(tmp_path / "loads", 2)
    text = (tmp_path / "loads").read_bytes()
    text = text.replace(b'{"layers":3,"experts":8,"chosen":2}', b"[3,8,2]")
    lines = broken(text.splitlines())
    lines[0] = lines[0]
    for old, new in ((b"[3,8,2]", (3, 8, 2)), (b"[3,9,2]", (3, 9, 2)), (b"[3,8,5]", (3, 8, 5))):
        lines[0] = lines[0].replace(old, b'{"layers":%d,"experts":%d,"chosen":%d}' % new)
    (tmp_path / "loads").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(LoadsError, match=sentence):
        list(read(tmp_path / "loads").steps)


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    """A second engine, or the same command again, writes beside it."""
    first = write(tmp_path / "loads.jsonl", 3)
    second = LoadsWriter(tmp_path / "loads.jsonl", HEADER)
    assert second.path == tmp_path / "loads.2.jsonl"
    second.write(first[0])
    assert LoadsWriter(tmp_path / "loads.jsonl", HEADER).path == tmp_path / "loads.3.jsonl"
    assert len(read(tmp_path / "loads.jsonl").steps) == 3 and len(read(second.path).steps) == 1


def test_a_full_disk_leaves_all_whole_lines(tmp_path: Path) -> None:
    """In the middle of a line; when there is room again, the next line is one of its own."""
    file = tmp_path / "loads"
    writer = LoadsWriter(file, HEADER)
    step = StepLoads(0, 4, counts(HEADER.target, 4, 0), None)
    writer.write(step)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
        with pytest.raises(OSError, match="too large"):
            writer.write(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    loads = read(file)
    assert len(list(loads.steps)) == 1 and not loads.cut
    writer.write(step)
    assert len(list(read(file).steps)) == 2
    with pytest.raises(OSError, match="No space left"):
        LoadsWriter(Path("/dev/full"), HEADER)


def test_steps_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """So a long recording takes no memory: what is kept of a step is eight bytes."""
    file, moe = tmp_path / "loads", Moe(40, 384, 6)
    writer = LoadsWriter(file, msgspec.structs.replace(HEADER, target=moe, draft=None))
    step = StepLoads(0, 64, counts(moe, 64, 0), None)
    for _ in range(300):
        writer.write(step)
    tracemalloc.start()
    steps = read(file).steps
    assert sum(one.rows for one in steps) == 300 * 64 and (steps[-1].target == step.target).all()
    assert [one.rows for one in steps.between(297)] == [64] * 3 and len(steps[5:8]) == 3
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20, "a step's counts take 123 KB"
