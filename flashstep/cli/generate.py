"""``flashstep generate``: complete prompts offline, in this process; one prompt streams, several run as one batch."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from flashstep.cli.model import resolve
from flashstep.cli.terminal import NOTES, OUT, note, note_acceptance, warn_of_falsified
from flashstep.config.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Complete one or more prompts without a server. The prompt is raw text; for a conversation use chat."""

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """what to continue; without any, standard input is the prompt"""
    model: Path | None = None
    """checkpoint folder (released layout); without it the embedded tiny model"""
    max_tokens: int = 128
    """most tokens to generate for each prompt"""
    temperature: float = 0.0
    """0 takes the most probable token; 1 samples from the model's distribution"""
    top_p: float = 1.0
    """sample only from the most probable tokens that make up this probability"""
    top_k: int = 0
    """sample only from so many tokens (0: all)"""
    ignore_eos: bool = False
    """go on after the end-of-sentence token"""
    options: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)

    def run(self) -> int:
        folder = resolve(self.model)
        config = self.options.checked().engine(folder)
        texts = self.prompts or (_standard_input(),)
        warn_of_falsified(config.falsifies)

        from flashstep.cli.local import LocalModel
        from flashstep.request import SamplingParams

        local = LocalModel(config)
        prompts = [local.tokenizer.encode(text) for text in texts]
        params = [
            SamplingParams(
                max_tokens=min(self.max_tokens, local.room(prompt)),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                ignore_eos=self.ignore_eos,
            )
            for prompt in prompts
        ]
        if len(prompts) == 1:
            detokenizer = local.tokenizer.detokenizer()
            for output in local.stream(prompts[0], params[0]):
                OUT.print(detokenizer.push(output.tokens), end="")
            OUT.print(detokenizer.finish())
            note_acceptance(local.acceptance)
            return 0
        with NOTES.status(f"{len(prompts)} prompts"):
            results = local.run_all(prompts, params)
        for text, outputs in zip(texts, results, strict=True):
            tokens = [token for output in outputs for token in output.tokens]
            note(f"> {text}")
            OUT.print(local.tokenizer.decode(tokens, skip_special_tokens=True))
        note_acceptance(local.acceptance)
        return 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        note("the prompt, ended by Ctrl-D:")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError("there is no prompt: give one as an argument or on standard input")
    return text
