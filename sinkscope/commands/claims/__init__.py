"""`claims`: tests what papers say on a model."""

from sinkscope.commands.claims.options import ClaimsOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "claims",
        __name__,
        ClaimsOptions,
        public={"claims": ".command:claims", "Scorecard": ".scorecard:Scorecard"},
        manifest=".manifest:ClaimsManifest",
        tables=(".columns:COLUMNS",),
        of_cells=("claim", "route"),
        figures={
            "claims": (
                ("scorecard", "the number of every claim, its threshold and published values", "claim"),
                ("scorecard-by-model", "the outcome of every claim, claims × models", "claim"),
            ),
            "interventions on several models": (
                ("routes", "routes that carry the sink in each model: sink rate before and after each is cut", "route"),
            ),
        },
        summaries=".scorecard:summaries",
        compared={"claims": ".scorecard:scorecards", "intervene": ".routes:compared_routes"},
        page=".page:ClaimsPage",
        script="page.js",
        lists={
            "claims": (
                "claims of papers and their tests", "claims", ".register:listed",
                "claim", "paper", "where", "what it says", "what is measured", "holds if (‡ our threshold)", "plugin",
            ),
        },
    ),
)  # fmt: skip
