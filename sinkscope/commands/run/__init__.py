"""`run`: runs a recipe."""

from sinkscope.commands.run.options import RunOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "run",
        __name__,
        RunOptions,
        recipes=("recipe", ""),
        public={"run": ".command:run_recipe", "run_recipe": ".command:run_recipe"},
    ),
)
