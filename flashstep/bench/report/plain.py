"""Text of others, made safe to stand beside ours: nothing of it turns what is around it, nothing of it is invisible.

Takes and gives strings. HTML's own characters are escaped where HTML is made (``page``).
"""

import unicodedata

OPEN, CLOSE = "\u2068", "\u2069"  # first strong isolate, and its end
BREAKS = "\n\t"
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str, *, kept: str = BREAKS) -> str:
    """Control characters and those that turn the direction of text, as \\u escapes; line ends stay."""
    return "".join(
        f"\\u{ord(letter):04x}" if letter not in kept and unicodedata.category(letter) in UNSEEN else letter
        for letter in text
    )


def isolated(text: str) -> str:
    """``text`` on one line, for the middle of a sentence: written from right to left, it stays within itself."""
    plain = visible(" ".join(text.split()))
    turns = any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in plain)
    return f"{OPEN}{plain}{CLOSE}" if turns else plain


def shown(text: str) -> str:
    """``visible``, with the isolates of ``isolated`` as they are."""
    own = OPEN + CLOSE if text.count(OPEN) == text.count(CLOSE) else ""
    return visible(text, kept=BREAKS + own)
