"""Dialogues as the server renders them: messages to text pieces, pieces to token ids with a loss weight for each.

``render`` writes the V4.1 prompt byte for byte as deepseek-recipe does (tests compare), but without that package, so
that training needs only a tokenizer. Pieces are cut at control tokens or line breaks only: there, and nowhere else,
the tokenizer of ``train.tokenizer`` never joins characters, so pieces may be encoded and cached alone.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
EFFORT = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501 - the recipe's own wording, byte for byte
TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)

WEIGHT_ANSWER = 1.0
WEIGHT_TEXT = 0.3
WEIGHT_USER = 0.1
WEIGHT_NOTES = 0.02
WEIGHT_LONG_NOTES = 0.01
WEIGHT_SYSTEM = 0.02

_CONTROL = re.compile(
    "(" + "|".join(map(re.escape, (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML))) + ")"
)


class Piece(NamedTuple):
    """A run of text whose tokens share one loss weight; ``written`` marks what the model itself would write."""

    text: str
    weight: float
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call; ``arguments`` keeps its order."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn. ``notes`` are paragraphs before ``content`` in the same user turn (low loss weight)."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation that ends with the model's answer, in the switches of a request."""

    messages: tuple[Message, ...]
    thinking: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    notes_weight: float = WEIGHT_NOTES

    def request(self, *, upto: int | None = None) -> dict[str, Any]:
        """The Chat Completions body of the conversation before its last answer (or before message ``upto``)."""
        messages = [
            _request_message(m, i) for i, m in enumerate(self.messages[: -1 if upto is None else upto])
        ]
        body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
        if self.tools:
            body["tools"] = [{"type": "function", "function": dict(tool)} for tool in self.tools]
        if not self.thinking:
            body["thinking"] = {"type": "disabled"}
        return body


def _request_message(message: Message, index: int) -> dict[str, Any]:
    content = "\n\n".join((*message.notes, message.content))
    body: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        body["tool_call_id"] = f"call_{index - 1}"
    if message.role == "assistant" and message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)},
            }
            for c in message.calls
        ]
    return body


def render_calls(calls: Sequence[Call]) -> str:
    """The DSML block of ``calls`` with the blank line before it, as the recipe renders history."""
    if not calls:
        return ""
    lines = [f"\n\n<{DSML} calls>"]
    for call in calls:
        lines.append(f'<{DSML} invoke name="{call.name}">')
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            kind = "true" if isinstance(value, str) else "false"
            lines.append(f'<{DSML} parameter name="{name}" string="{kind}">{text}</{DSML} parameter>')
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


def render(dialogue: Dialogue) -> list[Piece]:
    """The whole conversation as pieces; the last message is the answer to learn (earlier answers are learnt too)."""
    pieces = [Piece(BOS, 0.0)]
    messages = list(dialogue.messages)
    system = messages.pop(0).content if messages[0].role == "system" else ""
    if dialogue.thinking or system or dialogue.tools:
        pieces.append(Piece(SYSTEM, 0.0))
        if dialogue.thinking:
            pieces.append(Piece(EFFORT, WEIGHT_SYSTEM))
        if system:
            pieces.append(Piece(system, WEIGHT_SYSTEM))
        if dialogue.tools:
            schemas = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in dialogue.tools)
            pieces.append(Piece("\n\n" + TOOLS_HEAD + schemas + TOOLS_TAIL, WEIGHT_SYSTEM))
    last_user = max(i for i, m in enumerate(messages) if m.role in ("user", "tool"))
    for index, message in enumerate(messages):
        if message.role == "user":
            pieces.append(Piece(USER, 0.0))
            for paragraph in message.notes:
                pieces += [Piece(paragraph, dialogue.notes_weight), Piece("\n\n", dialogue.notes_weight)]
            pieces.append(Piece(message.content, WEIGHT_USER))
        elif message.role == "tool":
            pieces += [Piece(USER, 0.0), Piece(f"<tool_result>{message.content}</tool_result>", WEIGHT_USER)]
        else:
            reasons = dialogue.thinking and (index > last_user or bool(dialogue.tools))
            pieces += [Piece(ASSISTANT, 0.0), Piece(THINK if reasons else END_THINK, 0.0)]
            text = (
                (message.reasoning + END_THINK if reasons else "")
                + message.content
                + render_calls(message.calls)
            )
            pieces.append(Piece(text + EOS, WEIGHT_ANSWER, written=True))
    return pieces


class Encoder:
    """Pieces to ids. Stable texts (system lines, tool blocks, note paragraphs) are cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.control = {
            t: tokenizer.token_to_id(t) for t in (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML)
        }
        self.cached = functools.lru_cache(maxsize=60_000)(self._split)

    def text(self, text: str) -> list[int]:
        """Ids of plain text followed or preceded by control tokens; control spellings become control ids."""
        return list(self._split(text))

    def _split(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for part in _CONTROL.split(text):
            if part in self.control:
                ids.append(self.control[part])  # ty: ignore[invalid-argument-type]
            elif part:
                ids += self.tokenizer.encode(part, add_special_tokens=False).ids
        return tuple(ids)

    def document(self, pieces: Sequence[Piece]) -> tuple[list[int], list[float]]:
        """(ids, weights); ``weights[t]`` is the loss weight of predicting token t."""
        ids: list[int] = []
        weights: list[float] = []
        for piece in pieces:
            new = (
                self._split(piece.text)
                if piece.written or piece.weight == WEIGHT_USER
                else self.cached(piece.text)
            )
            ids += new
            weights += [piece.weight] * len(new)
        return ids, weights

    def prompt_and_answer(self, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        """Ids before and of the last written piece."""
        ids, _ = self.document(pieces[:-1])
        return ids, list(self._split(pieces[-1].text))
