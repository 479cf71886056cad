"""The error that a bad configuration raises: every broken rule, in sentences, at once."""

SHOWN = 100  # a checkpoint of other shapes breaks a rule for each of its tensors


class ConfigError(ValueError):
    """A configuration breaks one or more rules; ``problems`` holds one sentence for each."""

    def __init__(self, subject: str, problems: list[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in problems[:SHOWN])
        if len(problems) > SHOWN:
            lines += f"\n  - and {len(problems) - SHOWN} more"
        super().__init__(f"{subject} is not usable ({len(problems)} problem(s)):{lines}")
