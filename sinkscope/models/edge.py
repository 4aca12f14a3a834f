"""The edge around everything that runs a model: an error of its code or of a plugin becomes one line with the place."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from torch import nn

from sinkscope.errors import SinkscopeError, described, is_out_of_memory, was_interrupted
from sinkscope.plugins import package_with


@contextmanager
def naming_the_place(model: nn.Module) -> Iterator[None]:
    """Raise SinkscopeError, which names the module of the model or the plugin, for an error that another code raises.

    Errors that came from neither, SinkscopeError, an interrupt and a lack of memory pass through.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SinkscopeError) or was_interrupted(error) or is_out_of_memory(error):
            raise
        place, advice = place_of(error, model)
        if not place:
            raise
        raise SinkscopeError(f"{place} {advice} [{described(error)}]") from error


CALLED = "_call_impl"  # torch's function in which a module runs
OURS = "cannot be measured: please report it"


def place_of(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """Return the innermost module of the model, or the function of a plugin, in which an error arose, and what to do.

    Both are "" if there is none in its traceback.
    """
    names = {module: name for name, module in model.named_modules()}
    place, advice = "", ""
    for frame, _ in walk_tb(error.__traceback__):
        holder, code = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        if package := package_with(code):
            place = f"{frame.f_code.co_qualname} of the plugin {package}"
            advice = "raised an error: repair or uninstall it"
        elif frame.f_code.co_name == CALLED and holder in names:
            place = f"{names[holder] or 'the model'} ({type(holder).__name__})"
            advice = "raised an error: does the model run without sinkscope?"
        elif place and code.startswith("sinkscope."):
            advice = OURS
    return place, advice
