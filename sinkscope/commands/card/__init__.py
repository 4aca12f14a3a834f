"""`card`: a model card of runs, and a dataset of many models."""

from sinkscope.commands.card.options import CardOptions
from sinkscope.options.register import Command

COMMANDS = (Command("card", __name__, CardOptions, public={"card": ".command:card"}, tables=(".tables:CARD_TABLES",)),)
