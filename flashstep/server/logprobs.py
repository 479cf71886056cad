"""Log-probabilities as OpenAI's and vLLM's answers spell them: a chat's, a completion's, a prompt's.

Takes ``TokenLogprob``s, gives what JSON is made of: no infinity, and of a token that is no whole character its bytes. Knows no
choices and no streams.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from flashstep.chat.tokenizer import Detokenizer, TextTokenizer
from flashstep.request import TokenLogprob

LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """``logprob`` as JSON can say it, which has neither infinity nor NaN."""
    return max(LOWEST_LOGPROB, logprob)  # in this order: of a NaN, max gives the first


class Spelling:
    """A token's text, or its bytes where they are no whole character, as OpenAI spells them; ``as_ids``: its number, as vLLM."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(spelling: Spelling, items: Iterable[TokenLogprob], *, count: int) -> dict[str, Any]:
    """Chat's form: one entry a token, with its ``count`` best alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling(token),
            "logprob": finite(logprob),
            "bytes": list(spelling.tokenizer.token_bytes(token)),
        }

    content = [
        entry(item.token, item.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob, _ in item.top[:count]]}
        for item in items
    ]
    return {"content": content}


class TextLogprobs:
    """Completions' form of one choice: parallel lists, in parts as the tokens come.

    ``text_offset`` is where a token's first whole character begins in the text that all tokens so far make (counted in
    characters, hidden special tokens make none); a stop string that is cut from the text still counts.
    """

    def __init__(self, spelling: Spelling, *, count: int, skip_special_tokens: bool) -> None:
        self._spelling = spelling
        self._count = count
        self._answer = spelling.tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._offset = 0
        self._part: dict[str, list[Any]] = _empty()

    def prompt(self, first: int, scores: Sequence[TokenLogprob]) -> None:
        """An echoed prompt, before anything else; its ``first`` token has no log-probability."""
        shown = self._spelling.tokenizer.detokenizer(skip_special_tokens=False)
        self._place(first, shown)
        self._part["token_logprobs"].append(None)
        self._part["top_logprobs"].append(None)
        for item in scores:
            self._add(item, shown)
        self._offset += len(shown.finish())

    def answer(self, items: Iterable[TokenLogprob]) -> None:
        for item in items:
            self._add(item, self._answer)

    def take(self) -> dict[str, Any] | None:
        """What was added since the last time; None if nothing was."""
        part, self._part = self._part, _empty()
        return part if part["tokens"] else None

    def _add(self, item: TokenLogprob, shown: Detokenizer) -> None:
        self._place(item.token, shown)
        own = finite(item.logprob)
        best = {self._spelling(t): finite(value) for t, value, _ in item.top[: self._count]}
        self._part["token_logprobs"].append(own)
        self._part["top_logprobs"].append(best | {self._spelling(item.token): own})

    def _place(self, token: int, shown: Detokenizer) -> None:
        self._part["tokens"].append(self._spelling(token))
        self._part["text_offset"].append(self._offset)
        self._offset += len(shown.push((token,)))


def _empty() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def prompt_logprobs(spelling: Spelling, items: Iterable[TokenLogprob], *, count: int) -> list[Any]:
    """vLLM's form: null for the first position, then a map of token id to its logprob, rank and text."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": spelling(token)}

    positions: list[Any] = [None]
    for item in items:
        best = {str(token): entry(token, logprob, rank) for token, logprob, rank in item.top[:count]}
        positions.append({str(item.token): entry(item.token, item.logprob, item.rank)} | best)
    return positions
