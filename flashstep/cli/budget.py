"""``flashstep budget``: the memory plan of a model under given limits: what fits, and why."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from flashstep.cli.model import Model, tiny_model
from flashstep.cli.terminal import OUT
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.serve import EngineOptions
from flashstep.config.speculative import speculation


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Show what fits into memory, and why. MODEL may also be a config.json alone."""

    model: Model = None
    released: bool = False
    """the released DeepSeek-V4.1-Flash, whose checkpoint need not be here"""
    options: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)

    def run(self) -> int:
        if self.released and self.model is not None:
            raise ValueError("give MODEL or --released, not both")
        folder = Path("DeepSeek-V4.1-Flash") if self.released else self.model or tiny_model()
        model = released() if self.released else ModelConfig.read(folder)

        from flashstep.cache.budget import report

        engine = self.options.checked().engine(folder)
        if engine.speculative is not None:
            speculation(engine.speculative, model)
        OUT.print(report(model, engine))
        return 0
