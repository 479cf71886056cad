"""``flashstep chat``: a conversation in the terminal, with an engine in this process or with a server (--url)."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tyro

from flashstep.cli.model import Model, resolve
from flashstep.cli.remote import Delta, RemoteModel
from flashstep.cli.terminal import OUT, note, note_acceptance, warn_of_falsified
from flashstep.config.engine_options import EngineOptions, changed_options
from flashstep.request import Acceptance, SamplingParams

Messages = list[dict[str, Any]]
Answer = Callable[[Messages], Iterator[Delta]]
Counted = Callable[[], Acceptance | None]  # what speculation has done so far


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model in the terminal. An empty line or Ctrl-D ends; Ctrl-C ends an answer."""

    model: Model = None
    url: str | None = None
    """a running server, such as http://127.0.0.1:8000; without it the model is loaded here"""
    api_key: str | None = None
    """of the server at --url, if it asks for one; others on this machine see it with `ps`"""
    system: str | None = None
    """instructions for the model, said before the conversation"""
    thinking: bool = True
    """let the model reason before it answers"""
    max_tokens: int = 1024
    """most tokens of one answer, reasoning included"""
    temperature: float = 0.0
    """0 takes the most probable token; 1 samples from the model's distribution"""
    options: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)

    def run(self) -> int:
        if self.url is not None and self.model is not None:
            raise ValueError("give MODEL or --url, not both: a server has its own model")
        if self.url is not None and (given := changed_options(self.options)):
            raise ValueError(
                f"{', '.join(given)}: engine options mean nothing with --url; the server was started with its own"
            )
        if self.url is None and self.api_key is not None:
            raise ValueError("--api-key is for a server; without --url the model is loaded here")
        answer, counted = self._remote() if self.url is not None else self._local()
        messages: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        while (said := _read_turn()) is not None:
            messages.append({"role": "user", "content": said})
            reply = _show(answer(messages))
            messages.append({"role": "assistant", "content": reply})
        note_acceptance(counted())
        return 0

    def _remote(self) -> tuple[Answer, Counted]:
        assert self.url is not None
        remote = RemoteModel(self.url, api_key=self.api_key)
        note(f"{remote.model} at {self.url}")
        warn_of_falsified(remote.falsified_by)
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "thinking": {"type": "enabled" if self.thinking else "disabled"},
        }
        return lambda messages: remote.stream(messages, fields), lambda: None

    def _local(self) -> tuple[Answer, Counted]:
        config = self.options.checked().engine(resolve(self.model))
        warn_of_falsified(config.falsifies)

        from flashstep.chat.conversation import Conversation
        from flashstep.chat.encode import ChatEncoder
        from flashstep.cli.local import LocalModel

        local = LocalModel(config)
        encoder = ChatEncoder(local.tokenizer)

        def answer(messages: Messages) -> Iterator[Delta]:
            prompt = encoder.encode(Conversation(messages=messages, thinking=self.thinking))
            parser = prompt.parser()
            room = min(self.max_tokens, local.room(prompt.ids))
            reason = "stop"
            for output in local.stream(
                prompt.ids, SamplingParams(max_tokens=room, temperature=self.temperature)
            ):
                piece = parser.push(output.tokens)
                yield Delta(piece.reasoning, piece.content)
                reason = output.finish_reason or reason
            piece, _ = parser.finish(reason)
            yield Delta(piece.reasoning, piece.content)

        return answer, lambda: local.acceptance


def _read_turn() -> str | None:
    """What the user says next; None when the conversation ends."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - importing it gives input() line editing

    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return said or None


def _show(deltas: Iterator[Delta]) -> str:
    """Print an answer as it comes, reasoning dimmed, and return its content. Ctrl-C ends it early."""
    content = ""
    reasoning = False
    try:
        for delta in deltas:
            if delta.reasoning:
                reasoning = True
                OUT.print(delta.reasoning, end="", style="dim")
            if delta.content:
                if reasoning and not content:
                    OUT.print()
                OUT.print(delta.content, end="")
                content += delta.content
    except KeyboardInterrupt:
        OUT.print(" [stopped]", end="", style="dim")
    OUT.print()
    return content
