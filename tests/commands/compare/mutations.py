"""Single errors in `compare`, which its tests must notice."""

MUTATIONS = [
    ("curves of the layers, too", "figures", "draw_training_curves",
     'whole = table[table["layer"] == WHOLE_MODEL]', "whole = table"),
    ("round-off is a difference", "sinkscope.results.statistics", "differences", "<= ROUND_OFF *", "< 0 *"),
    ("ratio: of numbers that are equal", "sinkscope.results.side_by_side", "metrics_of",
     ".mask((apart == 0) & (first != 0), 1.0)", ""),
    ("metrics: all of them", "sinkscope.results.side_by_side", "metrics_of", "[*metrics] or table.index",
     "table.index"),
    ("ends swapped", "sinkscope.results.side_by_side", "metrics_of", "(each.low, each.high)", "(each.high, each.low)"),
    ("names: no settings", "sinkscope.results.side_by_side", "labels", "for setting, value in values.items()",
     "for setting, value in ()"),
    ("heads: those that do not differ", "sinkscope.output.comparison", "Comparison.summary_tables",
     'heads["differs"]', '~heads["differs"]'),
    ("heads: the halves of one run", "sinkscope.output.comparison", "head_findings", '("first", "second")',
     '("first", "first")'),
    ("heads: the first run's name", "sinkscope.output.comparison", "compared",
     "model=runs[1].model", "model=runs[0].model"),
    ("heads: texts of the other run", "sinkscope.output.comparison", "head_findings",
     "{texts[0]} and {texts[1]} texts", "{texts[1]} and {texts[0]} texts"),
    ("pairing: always said", "sinkscope.results.side_by_side", "pairing_lines", "if is_paired", "if True"),
    ("levels of runs that have none", "side_by_side", "compare", "elif metrics or by:", "elif metrics:"),
]  # fmt: skip
