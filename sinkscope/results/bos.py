"""Whether the sequences of a run begin with a BOS, by what run.json and tables say of token 0."""

WITH, WITHOUT = "with", "without"
OPTIONS = {WITH: "always", WITHOUT: "never"}  # the value of --bos that gives a policy with every tokenizer
_IN_FRONT = ("bos", "special token")  # how what a policy puts in front is described; encoders have a [CLS]


def begins_with_bos(token_zero: str) -> bool:
    """Whether position 0 holds a BOS, or what stands in its place.

    Args:
        token_zero: As `run.json` has it, for example "bos <s> (id 1)" or "first text token".
    """
    return token_zero.startswith(_IN_FRONT)


def policy_of(token_zero: str) -> str:
    """WITH or WITHOUT: whether a run has a BOS in front of its sequences. Only runs of one policy are comparable."""
    return WITH if begins_with_bos(token_zero) else WITHOUT
