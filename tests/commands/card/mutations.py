"""Single errors in `card`, which its tests must notice."""

MUTATIONS = [
    ("a rate is a mean over positions", "sinkscope.commands.intervene.findings", "whole_model",
     ' & effect["position"].isin((0, NO_POSITION))', ""),
    ("any run has a card", "output", "opened", "if record.whole_model", "if record.report"),
    ("digits after the point", "output", "_rounded", "{DIGITS}g", "{DIGITS}f"),
    ("results of an encoder are of generated text", "output", "_results_of_run",
     '"text-generation" if run.is_causal else "fill-mask"', '"text-generation"'),
    ("card: all texts are one dataset", "output", "_results_of_run",
     "{read['sequences']} x {lengths} tokens, {read['sha256'][:12]}", "one"),
    ("card: all papers are one dataset", "output", "Card.model_cards",
     "dataset_config=row.paper", "dataset_config=None"),
    ("card: the longest of several lengths", "output", "_results_of_run",
     'span((read["shortest"], read["longest"]))', 'read["longest"]'),
    ("push: without a folder", "command", "card", "if out is None:", "if out is not None:"),
    ("layers: rows of the whole model", "tables", "card_tables",
     'summary[summary["layer"] != WHOLE_MODEL].assign(**place)', "summary.assign(**place)"),
    ("values: infinite ones", "tables", "values_of",
     'table["value"].abs().lt(float("inf"))', 'table["value"].notna()'),
]  # fmt: skip
