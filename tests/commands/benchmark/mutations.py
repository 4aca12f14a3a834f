"""Single errors in `benchmark`, which its tests must notice."""

MUTATIONS = [
    ("scores: the error of the filter none", "command", "scores_table",
     'f"{metric}_stderr,{kind}"', 'f"{metric}_stderr,none"'),
]  # fmt: skip
