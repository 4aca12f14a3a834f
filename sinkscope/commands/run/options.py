"""The options of `run`."""

from typing import ClassVar

from sinkscope.options.measuring import DeviceOptions, InputOptions, ModelOptions
from sinkscope.options.option import option


class RunOptions(InputOptions, DeviceOptions, ModelOptions):
    """Run a recipe: an experiment or a paper's figure, with all its options, on any model.

    Options given here replace the recipe's. Writes what the recipe's command writes, with the recipe's
    figures, and prints the verdict, or a comparison of its runs."""

    arguments: ClassVar = ("recipe", "model")
    writes: ClassVar = "runs/RECIPE-MODEL"
    resumable: ClassVar = True
    shown: ClassVar = dict.fromkeys(
        (*ModelOptions.model_fields, *DeviceOptions.model_fields, *InputOptions.model_fields), "the recipe's"
    )

    recipe: str = option(
        ...,
        "A YAML file, or a name from `sinkscope list recipes`.",
        metavar="RECIPE",
        names="sinkscope.options.recipe:known_recipes",
    )
