"""Files that a command will write, looked at before it begins: none may be lost at the end, and none of another kind overwritten.

Takes paths by their flags; gives sentences, and writes them at the end. Knows no command.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

KINDS = {  # what a flag's file holds, in every command that has the flag
    "--json": "JSON",
    "--output-json": "JSON",
    "--trace": "JSON",
    "--svg": "SVG",
    "--png": "PNG",
}
LOOKED_AT = 1 << 20  # bytes of a file
NONE: Mapping[str, Path | None] = MappingProxyType({})


def output_problems(
    outputs: Mapping[str, Path | None],
    *,
    inputs: Mapping[str, Path | None] = NONE,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What speaks against writing each of ``outputs``, in sentences.

    An output that is one of ``inputs`` or another output, that cannot be written, or that is there and holds another kind of
    text than ``kinds`` or ``KINDS`` say is refused.
    """
    wrong: list[str] = []
    known = [(flag, path) for flag, path in inputs.items() if path is not None]
    for flag, path in outputs.items():
        if path is None:
            continue
        same = next((other for other, place in known if _is_same(place, path)), None)
        if same is not None:
            wrong.append(f"{flag} is {path}, which {same} is, too; name another file")
        elif (problem := _unwritable(path)) or (
            problem := _of_another_kind(path, {**KINDS, **kinds}.get(flag))
        ):
            wrong.append(f"{flag} is {path}; {problem}")
        known.append((flag, path))
    return wrong


def write(path: Path, data: bytes) -> None:
    """``data`` as the file at ``path``; ``ValueError`` where the disk is full or the place is gone by now."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"{path} was not written: {error.strerror or error}") from None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))
    except (OSError, RuntimeError):  # names too long; links in a circle: found by whoever opens them
        return False


def _unwritable(path: Path) -> str:
    """Why nothing could be written there. It is tried: rights say too little of it."""
    try:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if path.is_dir():
            return "that is a folder; name a file in it"
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        return f"it cannot be written: {error.strerror or error}"
    return ""


def _of_another_kind(path: Path, kind: str | None) -> str:
    if kind is None or not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            found = _kind(file.read(LOOKED_AT))
    except OSError:
        return ""  # written it can be
    if found in ("", kind):
        return ""
    return f"that is there and is {found}, not {kind}: it is not overwritten; name another file, or remove it"


def _kind(data: bytes) -> str:
    """What ``data``, the beginning of a file, seems to be; "" of nothing."""
    text = data.strip()
    if not text:
        return ""
    for opening, kind in {
        b"\x89PNG": "PNG",
        b"<svg": "SVG",
        b"<?xml": "SVG",
        b"<!doctype html": "HTML",
    }.items():
        if text[: len(opening)].lower() == opening.lower():
            return kind
    if text[:1] not in b"{[":
        return "something else"
    first, _, rest = text.partition(b"\n")
    if first.startswith(b'{"kind":') and b'"origin":' in first:
        return "a ledger"
    try:
        msgspec.json.decode(first)
    except msgspec.DecodeError:
        return "JSON"  # over many lines
    return "JSON lines" if rest else "JSON"
