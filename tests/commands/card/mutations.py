"""Single errors in `card`, which its tests must notice."""

MUTATIONS = [
    ("a rate is a mean over positions", "tables", "_of_experiment",
     ' & effect["position"].isin((0, NO_POSITION))', ""),
]  # fmt: skip
