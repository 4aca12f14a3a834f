"""The options of `list`."""

from typing import ClassVar

from sinkscope.options.option import Options, option


class ListOptions(Options):
    """List the kinds of names, or the names of one: observables, interventions, recipes, …"""

    arguments: ClassVar = ("kind",)

    kind: str | None = option(
        None,
        "One kind of names, or all.",
        metavar="KIND",
        shown="the kinds",
        names="sinkscope.commands.list.command:kinds",
    )
