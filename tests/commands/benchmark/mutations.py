"""Single errors in `benchmark`, which its tests must notice."""

MUTATIONS = [
    ("scores: the error of the filter none", "command", "scores_table",
     'f"{metric}_stderr,{kind}"', 'f"{metric}_stderr,none"'),
    ("seeds: without that of the examples", "command", "_evaluated", ', "fewshot_random_seed")', ")"),
    ("seeds: numpy's stays", "command", "_evaluated", "np.random.set_state(of_numpy)", "pass"),
    ("groups of groups are named", "command", "scores_table", "for group in of_groups:", "for group in asked:"),
]  # fmt: skip
