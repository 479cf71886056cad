"""The raw file: whole lines, and a disk that is full ends it and not the run."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from flashstep.bench.load import raw
from flashstep.bench.load.raw import Beginning, RawFile


class Line(msgspec.Struct):
    text: str


def test_a_full_disk_ends_the_file_at_a_whole_line_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [300]

    def write(place: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.pwrite(place, data[: left[0]], 0)  # O_APPEND: it goes to the end
        left[0] -= written
        return written

    monkeypatch.setattr(raw.os, "write", write)
    with RawFile(tmp_path / "raw") as file:
        for number in range(9):
            file.take(Line(f"{number}" * 60))
    assert "ends early: No space left on device" in file.fault
    first, *lines = (tmp_path / "raw").read_bytes().splitlines(keepends=True)
    msgspec.json.decode(first, type=Beginning)
    assert 1 <= len(lines) < 9 and [msgspec.json.decode(line, type=Line).text[0] for line in lines] == [
        str(n) for n in range(len(lines))
    ]
    assert lines[-1].endswith(b"\n")


def test_a_file_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    for path in (tmp_path / "there", tmp_path / "none" / "raw"):
        with pytest.raises(ValueError, match="cannot be made"), RawFile(path):
            pass
