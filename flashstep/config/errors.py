"""The error that a bad configuration raises: every broken rule, in sentences, at once."""


class ConfigError(ValueError):
    """A configuration breaks one or more rules; ``problems`` holds one sentence for each."""

    def __init__(self, subject: str, problems: list[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{subject} is not usable ({len(problems)} problem(s)):{lines}")
