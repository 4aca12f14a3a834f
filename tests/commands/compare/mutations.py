"""Single errors in `compare`, which its tests must notice."""

MUTATIONS = [
    ("curves of the layers, too", "figures", "draw_training_curves",
     'whole = table[table["layer"] == WHOLE_MODEL]', "whole = table"),
]  # fmt: skip
