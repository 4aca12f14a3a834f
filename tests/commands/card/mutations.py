"""Single errors in `card`, which its tests must notice."""

MUTATIONS = [
    ("a rate is a mean over positions", "sinkscope.commands.intervene.findings", "whole_model",
     ' & effect["position"].isin((0, NO_POSITION))', ""),
    ("any run has a card", "output", "opened", "if record.whole_model", "if record.report"),
    ("digits after the point", "output", "_rounded", "{DIGITS}g", "{DIGITS}f"),
]  # fmt: skip
