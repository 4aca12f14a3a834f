"""Find whether the sequences of a run begin with a BOS, from the description of token 0 in run.json and tables."""

WITH, WITHOUT = "with", "without"
OPTIONS = {WITH: "always", WITHOUT: "never"}  # policy → the value of --bos that gives it with every tokenizer
_IN_FRONT = ("bos", "special token")  # descriptions of a BOS, or of the [CLS] of encoders


def begins_with_bos(token_zero: str) -> bool:
    """Return whether position 0 holds a BOS or its equivalent.

    Args:
        token_zero: the description in `run.json`, for example "bos <s> (id 1)" or "first text token".
    """
    return token_zero.startswith(_IN_FRONT)


def policy_of(token_zero: str) -> str:
    """Return WITH or WITHOUT: whether sequences begin with a BOS. Only runs of the same policy are comparable."""
    return WITH if begins_with_bos(token_zero) else WITHOUT
