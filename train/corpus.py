"""Permissively licensed English text for the tiny model, taken from four Debian documentation packages.

``fetch`` downloads the packages with apt (never committed), ``build`` turns them into one small compressed file of
paragraphs and WordNet glosses, ``Corpus.read`` gives it back. Licences: public domain (SQLite), PostgreSQL licence,
PSF (Python) and WordNet 3.0. Knows nothing of tokens or dialogues.
"""

import dataclasses
import html.parser
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("sqlite3-doc", "postgresql-doc-15", "python3.11-doc", "wordnet-base")
DEFAULT_FILE = Path("build/train/corpus.json.xz")
PARAGRAPH_LIMIT = 30_000
MIN_CHARS, MAX_CHARS = 60, 420
MAX_GLOSS_WORDS = 12
COMMON_NOUN_LIMIT = 800

_BLOCK = re.compile(r"\s+")
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:()'\"/+*=<>_-]+[.!?]$")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Paragraphs of the manuals and (word, gloss) pairs, in a fixed order."""

    paragraphs: tuple[str, ...]
    glosses: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path = DEFAULT_FILE) -> "Corpus":
        """Read the file that ``build`` wrote."""
        if not path.exists():
            raise ValueError(f"{path} does not exist; make it with: python -m train.corpus --out {path}")
        data = json.loads(lzma.decompress(path.read_bytes()))
        return cls(tuple(data["paragraphs"]), tuple((word, gloss) for word, gloss in data["glosses"]))

    @classmethod
    def builtin(cls) -> "Corpus":
        """A few own sentences: enough for tests and the smoke run, which must work without apt."""
        things = ("river", "garden", "engine", "window", "market", "library", "bridge", "valley")
        verbs = ("stands near", "belongs to", "was built before", "looks like", "is older than")
        texts = [
            f"The {a} {v} the {b}, and nobody knows why."
            for a in things
            for v in verbs
            for b in things
            if a != b
        ]
        return cls(
            tuple(texts), (("dog", "a common pet that barks"), ("boat", "a small vessel for travel on water"))
        )


class _Paragraphs(html.parser.HTMLParser):
    """Collects the text of <p> elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._close()
            self._open = []
        elif tag in ("pre", "table", "ul", "dl", "div"):
            self._close()

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._close()

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open.append(data)

    def _close(self) -> None:
        if self._open:
            self.found.append(_BLOCK.sub(" ", "".join(self._open)).strip())
        self._open = None


def fetch(folder: Path) -> Path:
    """Download and unpack the packages below ``folder`` with apt; return the root of the unpacked tree."""
    debs, root = folder / "debs", folder / "root"
    debs.mkdir(parents=True, exist_ok=True)
    if len(list(debs.glob("*.deb"))) < len(PACKAGES):
        subprocess.run(["apt-get", "update"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "download", *PACKAGES], check=True, cwd=debs, stdout=subprocess.DEVNULL)
    for package in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def build(root: Path, out: Path, *, seed: int = 0) -> Corpus:
    """Extract paragraphs and glosses from the unpacked packages and write them to ``out``."""
    share = root / "usr/share"
    paragraphs: dict[str, None] = {}
    for folder in ("doc/sqlite3", "doc/postgresql-doc-15/html", "doc/python3.11/html"):
        for file in sorted((share / folder).rglob("*.html")):
            parser = _Paragraphs()
            parser.feed(file.read_text(encoding="utf-8", errors="replace"))
            for text in parser.found:
                for piece in _pieces(text):
                    paragraphs[piece] = None
    chosen = sorted(paragraphs)
    random.Random(seed).shuffle(chosen)
    corpus = Corpus(tuple(chosen[:PARAGRAPH_LIMIT]), tuple(_glosses(share / "wordnet")))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(lzma.compress(json.dumps(dataclasses.asdict(corpus)).encode(), preset=6))
    return corpus


def _pieces(text: str) -> list[str]:
    """Cut a long paragraph at sentence ends; keep pieces that read like plain ASCII prose."""
    pieces, current = [], ""
    for sentence in _SENTENCE.split(text):
        if current and len(current) + len(sentence) > MAX_CHARS:
            pieces.append(current)
            current = ""
        current = f"{current} {sentence}".strip()
    pieces.append(current)
    return [p for p in pieces if MIN_CHARS <= len(p) <= MAX_CHARS and _PROSE.fullmatch(p)]


def _glosses(folder: Path) -> list[tuple[str, str]]:
    """Short first-sense definitions of the most often tagged single-word nouns."""
    ranked = []
    for line in (folder / "index.noun").read_text(encoding="utf-8").splitlines():
        parts = line.split()
        if line.startswith(" ") or not parts[0].isalpha() or not 3 <= len(parts[0]) <= 10:
            continue
        senses = int(parts[2])
        tagged = int(parts[-senses - 1])
        ranked.append((-tagged, parts[0], parts[-senses]))
    offsets = {offset: word for _, word, offset in sorted(ranked, reverse=True)}
    order = {word: place for place, (_, word, _) in enumerate(sorted(ranked))}
    found = []
    for line in (folder / "data.noun").read_text(encoding="utf-8").splitlines():
        word = offsets.get(line[:8])
        if word is None or line.startswith(" "):
            continue
        gloss = line.split("| ", 1)[1].split(";")[0].strip()
        gloss = re.sub(r"\([^)]*\) ?", "", gloss).strip()
        clean = re.fullmatch(r"(?:a|an|the) [a-z ,'-]+", gloss)
        if clean and 3 <= len(gloss.split()) <= MAX_GLOSS_WORDS and word not in gloss.split():
            found.append((order[word], word, gloss))
    return [(word, gloss) for _, word, gloss in sorted(found)[:COMMON_NOUN_LIMIT]]


def main() -> None:
    """``python -m train.corpus [--out FILE]``: the data step of the training command, alone."""
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else DEFAULT_FILE
    corpus = build(fetch(out.parent / "packages"), out)
    print(
        f"{out}: {len(corpus.paragraphs)} paragraphs, {len(corpus.glosses)} glosses, {out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
