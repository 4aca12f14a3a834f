"""Single errors in `show`, which its tests must notice."""

MUTATIONS = [
    ("thresholds are not passed on", "command", "_estimates", "options.by, options.epsilon", "options.by"),
    ("csv with its index", "command", "_estimates", "index=False", "index=True"),
    ("a threshold without a metric", "options", "ShowOptions._check_metric", "self.by or self.epsilon", "self.by"),
    ("a format without a metric", "options", "ShowOptions._check_metric", "self.metric is None", "False"),
    ("null: the run itself", "command", "_estimates",
     "Sequences(RunData.open(options.null))", "Sequences(RunData.open(options.run))"),
    ("the page is not made again", "command", "command", "show(options.run, again=options.again)", "show(options.run)"),
    ("without a browser, nothing is printed", "command", "command",
     "webbrowser.open(page.absolute().as_uri())", "webbrowser.open(page.absolute().as_uri()) is not None"),
    ("a recipe: all figures are drawn again", "command", "show",
     'recipe["content"].get("figures", []) if recipe else None', "None"),
    ("a recipe without figures: all are drawn again", "command", "show", '.get("figures", [])', '.get("figures")'),
    ("a null without a metric", "options", "ShowOptions._check_metric", "or self.null ", ""),
]  # fmt: skip
