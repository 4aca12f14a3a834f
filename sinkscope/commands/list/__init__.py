"""`list`: the names that commands know."""

from sinkscope.commands.list.options import ListOptions
from sinkscope.options.register import Command

COMMANDS = (Command("list", __name__, ListOptions, public={"list": ".command:listing"}),)
