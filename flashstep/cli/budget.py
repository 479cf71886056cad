"""``flashstep budget``: the memory plan of a model under given limits: what fits, and why."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from flashstep.cli.model import Model, tiny_model
from flashstep.cli.terminal import OUT
from flashstep.config.engine_options import EngineOptions
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.speculative import speculation


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Show what fits into memory, and why. MODEL may also be a config.json alone."""

    model: Model = None
    released: bool = False
    """the released DeepSeek-V4.1-Flash, whose checkpoint need not be here"""
    device_memory_bytes: int | None = None
    """plan for a GPU with so many bytes free, wherever this runs; the default is this machine's device"""
    options: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)

    def run(self) -> int:
        if self.released and self.model is not None:
            raise ValueError("give MODEL or --released, not both")
        if self.device_memory_bytes is not None:
            if self.device_memory_bytes < 1:
                raise ValueError(
                    f"--device-memory-bytes is {self.device_memory_bytes}; it must be at least 1"
                )
            if self.options.device == "cpu":
                raise ValueError("--device-memory-bytes plans for a GPU, and --device is cpu; leave one out")
        folder = Path("DeepSeek-V4.1-Flash") if self.released else self.model or tiny_model()
        model = released() if self.released else ModelConfig.read(folder)

        engine = self.options.checked().engine(folder)
        if engine.speculative is not None:
            speculation(engine.speculative, model)

        from flashstep.cache.budget import report
        from flashstep.config.errors import ConfigError
        from flashstep.kernels.device import pick_device
        from flashstep.runner.build import rank_of
        from flashstep.runner.measure import expected, measures
        from flashstep.runner.memory import Machine, check_memory, lines, plan_memory, share_of

        layout, view = rank_of(engine, model)
        machine = Machine.here(pick_device(engine.device))
        if self.device_memory_bytes is not None:
            machine = Machine(host=machine.host, device_free=self.device_memory_bytes)
        if machine.device_free is not None and measures(engine, on_gpu=True):
            engine = expected(view, engine, layout=layout, free_bytes=machine.device_free)
        OUT.print(report(view, engine, share_of(view, layout)))
        plan = plan_memory(view, engine, layout=layout, on_gpu=machine.device_free is not None)
        OUT.print("\n".join(["", *lines(plan, machine)]))
        try:
            check_memory(plan, view, engine, layout=layout, machine=machine)
        except ConfigError as error:
            OUT.print("  It does not fit: " + "; ".join(error.problems))
        else:
            OUT.print("  It fits.")
        return 0
