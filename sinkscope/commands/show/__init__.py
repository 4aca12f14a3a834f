"""`show`: opens the page of a folder."""

from sinkscope.commands.show.options import ShowOptions
from sinkscope.options.register import Command

COMMANDS = (Command("show", __name__, ShowOptions, public={"page": ".command:page", "show": ".command:show"}),)
