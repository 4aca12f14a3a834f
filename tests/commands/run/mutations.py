"""Single errors in `run`, which its tests must notice."""

MUTATIONS = [
    ("only the first run is checked", "command", "run_recipe", "for asked in runs.values():", "for asked in [first]:"),
    ("pages of runs that are not wanted", "command", "run_recipe",
     "draw(run, read.content.figures, page)", "draw(run, read.content.figures)"),
    ("a page of the comparison that is not wanted", "command", "run_recipe",
     "draw(comparison, page=page)", "draw(comparison)"),
    ("no page: the other way round", "command", "run_recipe", "no_page=not page", "no_page=page"),
    ("failures: without those of the comparison", "command", "run_recipe",
     "undrawn.append(comparison.manifest)", "pass"),
    ("folder of the command: it is not overwritten", "command", "run_recipe", "overwrite=overwrite, ", ""),
    ("figures: the first of their tables", "command", "check_figures",
     "for table in spec.tables]", "for table in spec.tables[:1]]"),
    ("another model: the recipe's .gguf file", "sinkscope.options.recipe", "Recipe.options",
     'options.pop("gguf_file", None)', "pass"),
    ("failures: those of the first folder", "sinkscope.output.result", "figure_failure",
     "for manifest in manifests for", "for manifest in manifests[:1] for"),
]  # fmt: skip
