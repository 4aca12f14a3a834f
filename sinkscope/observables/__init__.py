"""What is measured, one phenomenon a file. A file with an `Observable` subclass that has a name is listed here."""

import sys

from sinkscope.discovery import named_subclasses
from sinkscope.observables.observable import Observable

# in the order of `sinkscope list` and of the tables
OBSERVABLES: dict[str, type[Observable]] = named_subclasses(sys.modules[__name__], Observable)
