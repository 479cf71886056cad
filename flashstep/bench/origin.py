"""Where a figure comes from: the command, the commit, the machine, its driver and its libraries.

Asks git and nvidia-smi once; where one is absent the field says so by being None. Imports neither torch nor an engine.
"""

import datetime
import importlib.metadata
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

GPU_QUERY = "name,uuid,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"

HIDDEN = "HIDDEN"  # a word that no shell quotes: commands are compared
SECRETS = {"--api-key", "--hf-token"}  # flags whose values are nobody's business
HEADERS, BODY = "--header", "--extra-body"  # of these the names stay
SECRET_FIELD = re.compile(
    r"(^|[-_.])(api[-_]?key|key|token|secret|password|passwd|auth|authorization|cookie)$", re.I
)
USER = re.compile(r"(\w+://)[^/@\s]+@")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The circumstances of one result. ``commit`` is flashstep's own, ``dirty`` whether tracked files differ from it.

    ``machine`` is the host's name and ``cpu`` its processor; ``gpus`` are nvidia-smi's lines (``GPU_QUERY``), as they stood
    when the command began; ``driver`` is NVIDIA's, None without one.
    """

    command: str
    date: str
    commit: str | None
    dirty: bool | None
    machine: str
    cpu: str
    gpus: tuple[str, ...]
    driver: str | None
    python: str
    torch: str | None
    flashstep: str | None

    @property
    def device(self) -> str:
        """What a table calls the machine: its first GPU and how many there are, or its CPU."""
        if not self.gpus:
            return self.cpu
        name = self.gpus[0].split(",")[0]
        return name if len(self.gpus) == 1 else f"{len(self.gpus)} x {name}"

    @property
    def revision(self) -> str:
        """The commit, with "+" where files differ from it; "unknown" outside a repository."""
        return f"{self.commit}{'+' if self.dirty else ''}" if self.commit else "unknown"


def origin() -> Origin:
    """Of the process that asks."""
    here = str(Path(__file__).parent)
    commit = _asked(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    changed = _asked(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    gpus = _asked(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]).splitlines()
    return Origin(
        command=shlex.join(["flashstep", *without_secret_flags(sys.argv[1:])]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        commit=commit or None,
        dirty=bool(changed) if commit else None,
        machine=platform.node(),
        cpu=_cpu(),
        gpus=tuple(gpus),
        driver=gpus[0].split(",")[2].strip() if gpus else None,
        python=platform.python_version(),
        torch=_version("torch"),
        flashstep=_version("flashstep"),
    )


def without_secret_flags(argv: Sequence[str]) -> list[str]:
    """A command line as a report may show it: keys, values of headers, secret fields of bodies and users in URLs are hidden.

    Words that are whole command lines (arms of a comparison) are looked at likewise.
    """
    found: list[str] = []
    flag = ""
    for word in argv:
        name, sign, value = word.partition("=")
        if word.startswith("--") and not any(letter.isspace() for letter in name):
            flag = name.replace("_", "-")
            found.append(name + sign + (_hidden(flag, value) if sign else ""))
        elif flag in {*SECRETS, HEADERS, BODY}:
            found.append(_hidden(flag, word))
        else:
            found.append(_line(word) if " --" in word else _plain(word))
    return found


def without_secrets(value: Any) -> Any:
    """A JSON value whose fields with names of secrets are hidden, at any depth."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if SECRET_FIELD.search(name) else without_secrets(inner)
            for name, inner in value.items()
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _hidden(flag: str, value: str) -> str:
    if flag in SECRETS:
        return HIDDEN
    if flag == HEADERS:
        return f"{value.partition('=')[0]}={HIDDEN}"
    if flag == BODY:
        try:
            body = json.loads(value)
            return value if (shown := without_secrets(body)) == body else json.dumps(shown)
        except (ValueError, RecursionError):
            return HIDDEN
    return _plain(value)


def _plain(word: str) -> str:
    return USER.sub(r"\1", word)


def _line(line: str) -> str:
    """A word that may be a command line of its own; as it was where there is nothing to hide."""
    try:
        words = shlex.split(line)
    except ValueError:
        return HIDDEN
    shown = without_secret_flags(words)
    pairs = sorted(zip(words, shown, strict=True), key=lambda pair: -len(pair[0]))  # one may hold the other
    for word, hidden in pairs:
        if word != hidden and word not in line:
            return shlex.join(shown)
        line = line if word == hidden else line.replace(word, hidden)
    return line


def _cpu() -> str:
    """The processor's name as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _asked(command: Sequence[str]) -> str:
    """What ``command`` prints, or nothing if it is not there or refuses."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
