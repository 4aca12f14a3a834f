"""`compare`: sets runs side by side."""

from sinkscope.commands.compare.options import CompareOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "compare",
        __name__,
        CompareOptions,
        public={"compare": ".side_by_side:compare"},
        compared={"analyze": "sinkscope.output.comparison:compared", "training": ".curves:curves"},
        figures={
            "trainings of your own": (
                ("training-curves", "what SinkCallback measured of each training, by step", "training"),
            ),
        },
        page=".page:ComparePage",
    ),
)  # fmt: skip
