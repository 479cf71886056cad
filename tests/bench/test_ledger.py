"""The ledger under what happens to files: many writers, a killed one, a full disk, other formats, no numbers."""

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashstep.bench.ledger import Entry, LedgerError, Samples, append, read, read_all, unequal
from flashstep.bench.origin import Origin, origin

HERE = origin()


def entry(label: str = "A", *, values: tuple[float | None, ...] = (1.0, 2.0), **fields: Any) -> Entry:
    samples = Samples(unit="step", keys=tuple(map(str, range(len(values)))), columns={"step_us": values})
    given: dict[str, Any] = {"settings": {"steps": len(values)}, "subject": {}, "metrics": {"step_us": 1.5}}
    return Entry(kind="probe", origin=HERE, samples=samples, label=label, **(given | fields))


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    written = [entry("A"), entry("B", values=(3.0, None), faults=("it rained",), complete=False, seed=7)]
    for item in written:
        append(ledger, item)
    assert read(ledger) == written
    assert [json.loads(line)["label"] for line in ledger.read_text().splitlines()] == ["A", "B"]
    assert written[1].samples.column("step_us") == {"0": 3.0}


def test_an_entry_that_is_read_twice_is_one_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    first, second = entry("A"), entry("B")
    for path, item in ((one, first), (one, first), (one, second), (other, second)):
        append(path, item)
    assert read(one) == [first, second]
    assert f"more than once: 1 entries ({first.id})" in caplog.text
    caplog.clear()
    assert read_all([one, other, one]) == [first, second]
    assert f"2 entries ({first.id}, {second.id})" in caplog.text


def test_two_entries_under_one_id_are_an_error(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    append(one, entry("A", id="x"))
    append(other, entry("A", id="x", values=(3.0, 4.0)))
    assert len(read(one)) == len(read(other)) == 1
    with pytest.raises(
        LedgerError,
        match=r"other\.jsonl, line 1: another entry than .*one\.jsonl, line 1, under the same id x",
    ):
        read_all([one, other])


def test_all_wrong_ledgers_are_told(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("text\n")
    with pytest.raises(LedgerError, match=r"no such ledger; .*b is no ledger: line 1"):
        read_all([tmp_path / "a", tmp_path / "b"])


def write_many(ledger: Path, label: str, count: int) -> None:
    for _ in range(count):
        append(ledger, entry(label, values=tuple(float(i) for i in range(20_000))))


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=write_many, args=(ledger, f"w{n}", 12)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = read(ledger)
    assert len(found) == 48
    assert all(sum(item.label == f"w{n}" for item in found) == 12 for n in range(4))
    assert {len(item.samples.keys) for item in found} == {20_000}


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    """So that nobody writes behind half a line of somebody else."""
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("before"))
    size = ledger.stat().st_size
    writer = multiprocessing.get_context("fork").Process(target=append, args=(ledger, entry("late")))
    with ledger.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and ledger.stat().st_size == size
        fcntl.flock(other, fcntl.LOCK_UN)  # the fork has the same open file: closing ours would not
    writer.join(30)
    assert [item.label for item in read(ledger)] == ["before", "late"]


def test_a_killed_writer_costs_its_own_line_only(tmp_path: Path) -> None:
    """SIGKILL at any time: what others wrote, before and after, stays readable."""
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("before"))
    spawn = multiprocessing.get_context("fork")
    for _ in range(8):
        writer = spawn.Process(target=write_many, args=(ledger, "killed", 1000))
        writer.start()
        size = ledger.stat().st_size
        while ledger.stat().st_size == size:
            time.sleep(0.001)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    append(ledger, entry("after"))
    labels = [item.label for item in read(ledger)]
    assert labels[0] == "before" and labels[-1] == "after" and set(labels[1:-1]) == {"killed"}


def test_a_torn_line_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is torn: within a key, a number, a word, behind a comma."""
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("A", values=(1.5, None)))
    whole = ledger.read_bytes()
    cuts = range(1, len(whole) - 1, 4)
    for cut in cuts:
        ledger.write_bytes(whole + whole[:cut])
        append(ledger, entry("B"))
        assert [item.label for item in read(ledger)] == ["A", "B"], whole[:cut]
    assert caplog.text.count("line 2 ends in the middle") == len(cuts)


def test_an_entry_whose_line_has_no_end_counts(tmp_path: Path) -> None:
    """As an editor leaves it."""
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("A"))
    ledger.write_bytes(ledger.read_bytes().rstrip(b"\n"))
    append(ledger, entry("B"))
    ledger.write_bytes(ledger.read_bytes() + b"\n  \n")
    assert [item.label for item in read(ledger)] == ["A", "B"]


def limited(ledger: Path, limit: int, told: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        append(ledger, entry("too long", values=tuple(map(float, range(5000)))))
    except OSError as error:
        told.put(str(error))


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    """A limit on the file's size stands for the disk: the kernel writes a part, then refuses."""
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("A"))
    before = ledger.read_bytes()
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    writer = fork.Process(target=limited, args=(ledger, len(before) + 1000, told))
    writer.start()
    assert "was not written" in told.get(timeout=30)
    writer.join()
    assert ledger.read_bytes() == before


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, entry("A"))
    good = json.loads(ledger.read_text())
    lines = [good, good | {"colour": "red"}, good | {"format": 9, "planet": 1}, [1], good | {"kind": "dance"}]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LedgerError) as caught:
        read(ledger)
    text = str(caught.value)
    assert "line 1:" not in text
    assert "line 2: Object contains unknown field `colour`" in text
    assert "line 3: format 9; this flashstep reads 2" in text and "planet" not in text
    assert "line 4:" in text and "line 5: Invalid enum value 'dance'" in text


def test_a_file_of_something_else_is_told_briefly(tmp_path: Path) -> None:
    picture = tmp_path / "ledger.jsonl"
    picture.write_text("<svg>\n" * 5000)
    with pytest.raises(LedgerError, match="and 4990 more lines") as caught:
        read(picture)
    assert len(str(caught.value)) < 2000
    with pytest.raises(LedgerError, match="no such ledger"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(LedgerError, match="no such ledger"):
        read(tmp_path)


def test_values_that_json_cannot_hold(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    append(
        ledger,
        entry(values=(1.0, float("nan"), float("inf")), metrics={"step_us": float("nan"), "output_tps": 2.0}),
    )
    (found,) = read(ledger)
    assert found.samples.columns["step_us"] == (1.0, None, None)
    assert found.metrics == {"output_tps": 2.0}
    assert found.faults == (
        "metric step_us was nan and is left out",
        "2 values of step_us were no finite numbers and are left out",
    )


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(LedgerError, match="could not be read again"):
        append(ledger, msgspec.structs.replace(entry(), kind="dance"))
    assert not ledger.exists()


def test_samples_have_one_key_each() -> None:
    with pytest.raises(ValueError, match="same key"):
        Samples(unit="step", keys=("a", "a"), columns={})
    with pytest.raises(ValueError, match="other numbers of values in x"):
        Samples(unit="step", keys=("a",), columns={"x": (1.0, 2.0)})


def test_unequal_settings_are_found() -> None:
    arms = [entry("A", settings={"n": 1, "k": [1, 2]}), entry("B", settings={"n": 2, "k": [1, 2]})]
    assert unequal(arms) == {"n": [1, 2]}
    assert unequal([arms[0], entry("B", settings={"n": 1})]) == {"k": [[1, 2], None]}


def test_an_origin_says_what_is_known() -> None:
    assert HERE.python and HERE.machine and HERE.cpu
    told = msgspec.structs.replace(HERE, commit="abc", dirty=True, gpus=("H200, x, 1", "H200, y, 1"))
    assert (told.revision, told.device) == ("abc+", "2 x H200")
    assert isinstance(told, Origin)
