"""Single errors in `compare`, which its tests must notice."""

MUTATIONS = [
    ("curves of the layers, too", "figures", "draw_training_curves",
     'whole = table[table["layer"] == WHOLE_MODEL]', "whole = table"),
    ("formats: the first minus the second", "formats", "differences", "drawn[1] - drawn[0]", "drawn[0] - drawn[1]"),
    ("formats: independent on the same tokens", "formats", "differences", "if is_paired:", "if False:"),
    ("formats: paired on other tokens", "formats", "differences",
     'first.manifest["input"]["sha256"] == second.manifest["input"]["sha256"]', "True"),
    ("formats: each scheme with each", "formats", "differences",
     '["scheme", "part"] if is_shared', '["part"] if is_shared'),
    ("formats: copies are texts of their own", "formats", "_resampled",
     "run.text_numbers.tolist()", "range(len(cost))"),
    ("formats: losses of all parts", "formats", "_resampled", ' & (table["part"] == part)', ""),
    ("formats: losses in the order of the table", "formats", "_resampled", '.sort_values("sequence")', ""),
    ("formats: static costs on the probes, too", "formats", "_costs",
     '(table["sequences"] == table["sequences"].max()) & ', ""),
    ("formats: a difference is decided by its value", "formats", "_difference",
     "difference.low > 0 or difference.high < 0", "difference.value"),
    ("formats: round-off is a difference", "formats", "_difference", "abs(difference.value) < ROUND_OFF", "False"),
    ("formats: less is more", "formats", "_difference", '(Outcome.FALLS, "less")', '(Outcome.FALLS, "more")'),
    ("formats: all parts are findings", "formats", "findings", 'table[table["part"] == settings.ALL]', "table"),
]  # fmt: skip
