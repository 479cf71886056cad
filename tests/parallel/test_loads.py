"""The file of expert loads: what goes in comes out, however its writing ended."""

from pathlib import Path

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
        read(tmp_path / "loads")
