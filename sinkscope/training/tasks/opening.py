"""How the sequences of a task begin, as `--bos`, `--random-tokens` and `--fixed-position` say (WSE §5)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """With <s>, without, or with other tokens, behind which the task's rules begin anew.

    Attributes:
        bos: Whether <s> stands in front.
        random_tokens: So many tokens in front, in the place of <s>, are drawn uniformly from all others.
        fixed_position: <s> stands here, behind so many tokens of another sequence.
    """

    bos: bool = True
    random_tokens: int = 0
    fixed_position: int | None = None

    @property
    def in_front(self) -> int:
        """Tokens before those that follow the rules, and their <s>."""
        return self.random_tokens or self.fixed_position or 0

    @property
    def has_start(self) -> bool:
        """Whether <s> stands before those that follow the rules."""
        return self.fixed_position is not None or (self.bos and not self.random_tokens)

    @property
    def length(self) -> int:
        """Tokens before the first one that follows the rules."""
        return self.in_front + self.has_start


WITH_BOS = Opening()
