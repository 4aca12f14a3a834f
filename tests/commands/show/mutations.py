"""Single errors in `show`, which its tests must notice."""

MUTATIONS = [
    ("thresholds are not passed on", "command", "_estimates", "options.by, options.epsilon", "options.by"),
    ("csv with its index", "command", "_estimates", "index=False", "index=True"),
    ("a threshold without a metric", "options", "ShowOptions._check_metric", "self.by or self.epsilon", "self.by"),
    ("a format without a metric", "options", "ShowOptions._check_metric", "self.metric is None", "False"),
    ("null: the run itself", "command", "_estimates",
     "Sequences(RunData.open(options.null))", "Sequences(RunData.open(options.run))"),
]  # fmt: skip
