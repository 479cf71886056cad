"""``flashstep kernels``: the table op x implementation on this machine, with the reason for every row passed over."""

from dataclasses import dataclass

from rich.table import Table

from flashstep.cli.terminal import OUT


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Show which implementation each op would use on this machine, and why."""

    kernels: str = "auto"
    """auto, reference, or reference:FAMILY.OP[,...]"""

    def run(self) -> int:
        import torch

        from flashstep.kernels import choices

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        table = Table(title=f"kernels on {device}", title_justify="left")
        table.add_column("op", no_wrap=True)  # to be copied into --kernels
        table.add_column("implementation", no_wrap=True)
        table.add_column("passed over")
        for op, choice in choices(device, kernels=self.kernels).items():
            reasons = "; ".join(
                f"{module.removeprefix('flashstep.kernels.')}: {why}" for module, why in choice.passed_over
            )
            table.add_row(op, choice.chosen.module.removeprefix("flashstep.kernels."), reasons)
        OUT.print(table)
        return 0
