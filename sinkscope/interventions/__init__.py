"""What is taken away, moved or replaced, one mechanism a file. A file with an `Intervention` that has a name is listed.

with intervening(model, "zero-massive:layers=11,coordinates=507"):
    model.generate(…)
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError
from transformers import PreTrainedModel

from sinkscope.config import unknown
from sinkscope.discovery import modules_of
from sinkscope.errors import InputError
from sinkscope.families import find_family
from sinkscope.interventions.intervention import Intervention, Known, Target, applied
from sinkscope.seam import open_seam

INTERVENTIONS: dict[str, type[Intervention]] = {
    item.name: item
    for module in modules_of(sys.modules[__name__])
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Intervention) and item.__module__ == module.__name__
    if hasattr(item, "name")
}


def parse(text: str) -> Intervention:
    """NAME or NAME:key=value,key=value; a value may be a list: coordinates=138,447 and layers=1-3.

    Errors: InputError for names, parameters and values that do not exist.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in INTERVENTIONS:
        raise InputError(f"intervention {unknown(name, INTERVENTIONS)}")
    kind = INTERVENTIONS[name]
    parameters: dict[str, str] = {}
    last = None
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if equals:
            last = key.strip().replace("-", "_")
            if last in parameters:
                raise InputError(f"--do {text}: '{last}' is given twice")
            parameters[last] = value.strip()
        elif last is None:
            raise InputError(f"--do {text}: '{part}' is no key=value")
        else:  # a list goes on
            parameters[last] += f",{part}"
    for key in parameters:
        if key not in kind.model_fields:
            known = f"parameter {unknown(key, kind.model_fields)}" if kind.model_fields else "it has no parameters"
            raise InputError(f"--do {text}: {known}")
    try:
        return kind(**parameters)
    except ValidationError as error:
        worst = error.errors()[0]
        where = str(worst["loc"][0]) if worst["loc"] else name
        message = worst["msg"].removeprefix("Value error, ")
        raise InputError(f"--do {text}: {where}: {message[0].lower() + message[1:]}") from None


@contextmanager
def intervening(model: PreTrainedModel, *do: str | Intervention) -> Iterator[None]:
    """Change a loaded model until the end of the block: `model(…)`, `generate` and gradients are then the changed
    model's. Several are stacked in their order.

    Errors: InputError where one does not apply, names what the model does not have, or would change nothing; the
    model is then untouched. SinkscopeError at the end where no pass met the position that was to be changed.
    """
    family = find_family(model)
    with open_seam(model, family) as seams:
        target = Target(model, family, seams)
        parts = [_decided(part, target) for part in do]
        with applied(target, parts):
            yield


def _decided(part: str | Intervention, target: Target) -> Intervention:
    chosen = parse(part) if isinstance(part, str) else part
    longest = getattr(target.model.config.get_text_config(), "max_position_embeddings", None) or 1
    reason = chosen.inapplicable(target)
    return chosen if reason else chosen.resolved(Known(target, longest))


__all__ = ["INTERVENTIONS", "Intervention", "Known", "Target", "applied", "intervening", "parse"]


def parse_all(do: str | Intervention | Iterable[str | Intervention]) -> tuple[Intervention, ...]:
    """One or several, as text or made already."""
    parts = [do] if isinstance(do, str | Intervention) else list(do)
    return tuple(parse(part) if isinstance(part, str) else part for part in parts)
