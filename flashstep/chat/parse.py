"""What the model answers, ids to message parts, piece by piece: reasoning, content, tool calls; stop strings.

``ChatParser`` wraps ``deepseek_recipe``'s stream parser, which reads control tokens by id (text that merely looks like markup
stays text). ``TextParser`` is the same interface for raw completions. Stop strings are matched here and not by the recipe,
because min_tokens, include_stop_str_in_output and stop_reason need to know where and what matched. Knows no HTTP.
"""

from collections import deque
from collections.abc import Sequence

import deepseek_recipe as recipe
import msgspec

from flashstep.chat.tokenizer import Detokenizer, TextTokenizer

REPLACEMENT = "\ufffd"
MARKUP_BEGINS = "\n<"  # what stands before the token of a tool call's markup, and belongs to it
TAIL_PIECES = 64  # how far back the end of an answer is searched for bytes that are no whole character


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of call number ``index``: its first piece carries ``id`` and ``name``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct):
    """What some tokens added to the answer. Within one delta reasoning comes before content before calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back what may become one.

    "First" is what a reader of single characters would see first: the earliest end; at the same end, the first of the list.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now safe to show. After a match (``matched``) nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), order) for order, s in enumerate(self._stop) if (at := text.find(s)) >= 0]
        if ends:
            end, order = min(ends)
            self.matched = self._stop[order]
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        keep = self._may_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            ending = text[len(text) - length :]
            if any(s.startswith(ending) for s in self._stop):
                return length
        return 0


class TextParser:
    """A raw completion: everything is content. ``num_tokens`` counts what was read up to the stop."""

    reasoning_tokens = 0

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stop, include=include_stop) if stop else None
        self._min_tokens = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer, once one has."""
        return self._stop.matched if self._stop is not None else None

    def push(self, tokens: Sequence[int]) -> Delta:
        if self._stop is None:
            self.num_tokens += len(tokens)
            return Delta(content=self._detokenizer.push(tokens))
        shown = ""
        for (
            token
        ) in tokens:  # one at a time, so that num_tokens ends with the token that completes the stop string
            self.num_tokens += 1
            text = self._detokenizer.push((token,))
            shown += self._stop.push(text) if self.num_tokens > self._min_tokens else text
            if self._stop.matched is not None:
                break
        return Delta(content=shown)

    def finish(self, reason: str) -> tuple[Delta, str]:
        """The last piece and the finish reason to report, given the engine's."""
        if self.stopped is not None:
            return Delta(), "stop"
        text = self._detokenizer.finish()
        if self._stop is not None:
            text = self._stop.push(text) + self._stop.finish()
        return Delta(content=text), "stop" if self.stopped is not None else reason


class _FunctionPiece(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _CallPiece(msgspec.Struct):
    index: int
    id: str | None = None
    function: _FunctionPiece = msgspec.field(default_factory=_FunctionPiece)


class _RecipeDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _RecipeChoice(msgspec.Struct):
    delta: _RecipeDelta
    finish_reason: str | None = None


class _RecipeChunk(msgspec.Struct):
    choices: list[_RecipeChoice]


RecipeChunks = Sequence[recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent]

_decode_chunk = msgspec.json.Decoder(_RecipeChunk).decode


class ControlTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids with a meaning: ``hidden`` ones (turn tokens, EOS, padding) never show; the other two can end the reasoning."""

    hidden: frozenset[int]
    thinking_end: int
    dsml: int


class ChatParser:
    """One answer of a chat. Made by ``ChatPrompt.parser``.

    Stop strings are matched in content only, as the recipe does: neither reasoning nor tool calls end on them. No "</think>"
    before the end means that all was reasoning, whether EOS or the length ended it. ``num_tokens`` counts every token read,
    ``reasoning_tokens`` those whose text is reasoning. (The recipe's own count is wrong where tokens share a character.)
    """

    def __init__(
        self,
        processor: recipe.StreamProcessor,
        tokenizer: TextTokenizer,
        *,
        control: ControlTokens,
        in_reasoning: bool,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        max_tool_calls: int | None = None,
    ) -> None:
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self._processor = processor
        self._tokenizer = tokenizer
        self._control = control
        self._dsml_text = tokenizer.token_text(control.dsml)
        self._in_reasoning = in_reasoning
        self._uncounted = 0  # tokens of the reasoning whose text is still held back
        self._stop = StopMatcher(stop, include=include_stop) if stop else None
        self._min_tokens = min_tokens
        self._max_tool_calls = max_tool_calls
        self._tail: deque[list[int]] = deque(maxlen=TAIL_PIECES)  # as pushed: the recipe decodes each as one
        self._finish_reason: str | None = None
        processor.push(recipe.InferenceChunk.ready())

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer, once one has."""
        return self._stop.matched if self._stop is not None else None

    def push(self, tokens: Sequence[int]) -> Delta:
        if self._stop is None:
            self.num_tokens += len(tokens)
            return self._push(tokens)
        total = Delta()
        for (
            token
        ) in tokens:  # one at a time, so that num_tokens ends with the token that completes the stop string
            self.num_tokens += 1
            delta = self._push((token,))
            if self.num_tokens > self._min_tokens:
                delta.content = self._stop.push(delta.content)
                if (
                    delta.tool_calls
                ):  # content ends where calls begin: nothing held back can become a stop string
                    delta.content += self._stop.finish()
            _extend(total, delta)
            if self._stop.matched is not None:
                break
        return total

    def finish(self, reason: str) -> tuple[Delta, str]:
        """The last piece and the finish reason to report ("tool_calls" when calls were made), given the engine's."""
        delta = Delta()
        if self.stopped is None and (lost := self._unfinished_text()):
            _extend(delta, self._read(self._processor.push(recipe.InferenceChunk.text(lost))))
        length = reason == "length"
        ended = recipe.InferenceFinishReason.Length if length else recipe.InferenceFinishReason.Stop
        if not self._processor.finished:
            last = self._read(self._processor.push(recipe.InferenceChunk.finish(ended)))
            if not self._processor.finished:
                _extend(last, self._read(self._processor.finish()))
            if self.stopped is None:
                _extend(delta, last)
        if self.stopped is not None:
            return Delta(), "stop"
        if self._in_reasoning and delta.reasoning:
            self.reasoning_tokens += self._uncounted
        if self._stop is not None:
            delta.content = self._stop.push(delta.content) + self._stop.finish()
            if self._stop.matched is not None:
                return delta, "stop"
        if reason not in ("stop", "length"):
            return delta, reason
        found = self._finish_reason or reason
        return delta, "stop" if found == "tool_calls" and self._max_tool_calls == 0 else found

    def _push(self, tokens: Sequence[int]) -> Delta:
        hidden = self._control.hidden
        shown = [t for t in tokens if t not in hidden and self._tokenizer.has_text(t)]
        if not shown or self._processor.finished:
            return Delta()
        if not self._in_reasoning:
            return self._push_shown(shown)
        total = Delta()
        for piece in self._pieces(shown):
            delta = self._push_shown(piece)
            if self._in_reasoning:
                self._count_reasoning(piece, delta)
            _extend(total, delta)
        return total

    def _push_shown(self, shown: list[int]) -> Delta:
        self._tail.append(shown)
        return self._read(self._processor.push(recipe.InferenceChunk.tokens(shown)))

    def _pieces(self, shown: list[int]) -> list[list[int]]:
        """Single tokens where reasoning may begin or end within them, so that counts do not depend on how tokens arrive."""
        borders = self._control.thinking_end in shown or self._control.dsml in shown
        first = 0 if borders or not self.reasoning_tokens else len(shown)
        while first and not self._tokenizer.token_text(shown[first - 1]).strip(MARKUP_BEGINS):
            first -= 1  # held back: the next token tells what it is
        return [shown[:first]] * bool(first) + [[token] for token in shown[first:]]

    def _count_reasoning(self, piece: list[int], delta: Delta) -> None:
        if piece[0] == self._control.thinking_end:
            self._in_reasoning = False
            self.reasoning_tokens += self._uncounted
        elif delta.content or delta.tool_calls:  # what was held back was markup
            self._in_reasoning = False
        elif (
            not self.reasoning_tokens
            and not self._uncounted
            and not self._tokenizer.decode(piece).strip("\n")
        ):
            return  # newlines before the first thought are dropped
        else:
            self._uncounted += len(piece)
            if delta.reasoning:
                # "<" of a possible tag decides with the token after it: that one is still held back
                held = int(piece[0] == self._control.dsml and not delta.reasoning.endswith(self._dsml_text))
                self.reasoning_tokens += self._uncounted - held
                self._uncounted = held

    def _read(self, chunks: RecipeChunks) -> Delta:
        total = Delta()
        for raw in chunks:
            chunk = _decode_chunk(raw.to_json())
            choice = chunk.choices[0]
            piece = choice.delta
            if piece.reasoning_content:
                total.reasoning += piece.reasoning_content
            if piece.content:
                total.content += piece.content
            if piece.tool_calls:
                self._add_calls(total, piece.tool_calls)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
        return total

    def _add_calls(self, total: Delta, pieces: Sequence[_CallPiece]) -> None:
        limit = self._max_tool_calls
        calls = tuple(
            ToolCallDelta(index=p.index, id=p.id, name=p.function.name, arguments=p.function.arguments)
            for p in pieces
            if limit is None or p.index < limit
        )
        _extend(total, Delta(tool_calls=calls))

    def _unfinished_text(self) -> str:
        """The text of trailing bytes that are no whole character, which the recipe still waits for."""
        data = [b"".join(map(self._tokenizer.token_bytes, piece)) for piece in self._tail]
        text = b"".join(data).decode("utf-8", errors="replace")
        if not text.endswith(REPLACEMENT):
            return ""
        shown = ""
        for count in range(len(data) - 1, 0, -1):
            before = b"".join(data[:count]).decode("utf-8", errors="replace")
            if not before.endswith(REPLACEMENT):
                shown = before
                break
        return text[len(shown) :]


def _extend(total: Delta, more: Delta) -> None:
    """Append ``more``; pieces of the same call become one."""
    total.reasoning += more.reasoning
    total.content += more.content
    for piece in more.tool_calls:
        calls = total.tool_calls
        if calls and calls[-1].index == piece.index and piece.id is None:
            calls[-1].arguments += piece.arguments
        else:
            total.tool_calls = (*calls, piece)
