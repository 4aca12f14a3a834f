"""Which models belong together, by their names: sizes of a family, and a chat model and its base."""

import re
from collections.abc import Mapping

from sinkscope.results.run import RunData

FEWEST = 4  # sizes: resampled, fewer give no interval of a rank correlation
MORE_SIZES = f"sinkscope claims --from RUN --from RUN …, with runs of {FEWEST} or more sizes of its family"
MORE_SCORES = (
    f"sinkscope claims --from RUN … --from SCORES …, with runs of {FEWEST} or more sizes of its family and what "
    "sinkscope benchmark --tasks {} gave of each"
)
_SIZE = re.compile(r"(?<![a-z0-9])\d+(\.\d+)?[mbk](?![a-z0-9])", re.IGNORECASE)
_SIZE_IN_WORDS = re.compile(r"[-_](small|medium|large|xl)(?=$|[-_.])", re.IGNORECASE)
_CHAT = re.compile(r"[-_](chat|instruct|it|sft|dpo)(?=$|[-_.])", re.IGNORECASE)
_COMPARABLE = ("seq_len", "window", "epsilon")


def family_of(name: str) -> str:
    """A model's name without its size."""
    return _SIZE_IN_WORDS.sub("", _SIZE.sub("…", name))


def sizes(name: str, naturals: Mapping[str, RunData]) -> dict[str, RunData]:
    """Of the runs of all models those of this model's family that were measured alike, from the smallest model on;
    none where there are too few.
    """
    if name not in naturals:
        return {}
    found = {
        other: run
        for other, run in naturals.items()
        if family_of(other) == family_of(name)
        and _measured_alike(run, naturals[name])
        and run.manifest["model"].get("parameters")
    }
    by_size = dict(sorted(found.items(), key=lambda item: parameters(item[1])))
    return by_size if len(set(map(parameters, by_size.values()))) >= FEWEST else {}


def parameters(run: RunData) -> int:
    return int(run.manifest["model"]["parameters"])


def _measured_alike(first: RunData, second: RunData) -> bool:
    return all(first.manifest["config"].get(key) == second.manifest["config"].get(key) for key in _COMPARABLE)


def with_base(name: str, naturals: Mapping[str, RunData]) -> dict[str, RunData]:
    """The runs of a chat model's base and of itself, in this order; none unless both were measured, and alike."""
    base = base_of(name)
    if (
        base is None
        or base not in naturals
        or name not in naturals
        or not _measured_alike(naturals[base], naturals[name])
    ):
        return {}
    return {base: naturals[base], name: naturals[name]}


def base_of(name: str) -> str | None:
    """What the model was called before it was tuned to chat; None if its name says of no tuning."""
    base = _CHAT.sub("", name)
    return base if base != name else None
