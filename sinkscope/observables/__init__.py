"""What is measured, one phenomenon a file. A file with an `Observable` subclass that has a name is listed here."""

import sys

from sinkscope.discovery import modules_of
from sinkscope.observables.observable import Observable

# in the order of `sinkscope list` and of the tables
OBSERVABLES: dict[str, type[Observable]] = {
    item.name: item
    for module in modules_of(sys.modules[__name__])
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Observable) and item.__module__ == module.__name__
    if hasattr(item, "name")
}
