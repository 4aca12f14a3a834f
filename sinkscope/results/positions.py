"""The kinds of positions of a run's model, and whether equal tokens stay equal under them (WSE §3.3)."""

from sinkscope.models.family import ATTENTION, FEED_FORWARD, NO_POSITIONS, NOT_RUN, ON_LOGITS
from sinkscope.results.run import RunData
from sinkscope.retrofits.operation import SUM_TO_ONE

ADDED = {"learned", "sinusoidal"}  # added to the embeddings, where they make equal tokens different
WITHIN_ATTENTION = {"rotary", *ON_LOGITS, NO_POSITIONS}  # only these leave equal tokens equal


def kinds_of_positions(run: RunData) -> set[str]:
    family = run.manifest["family"]
    return set(family.get("layer_positions") or (family["positions"],)) - {""}


def unequal(run: RunData) -> dict[str, list[str]]:
    """Return reason → causes why equal tokens do not stay equal, for any kind of positions.

    The reasons are "outside": attended terms outside the text take more attention of a query that sees few tokens;
    "operations": attention operations whose weights sum to more for a query that sees more tokens; "others": kinds of
    layers that mix tokens by other means than attention.
    """
    family, operations = run.manifest["family"], run.manifest["model"].get("operations") or ()
    kinds = [kind for kind in family.get("kinds") or () if kind not in (ATTENTION, NOT_RUN, *FEED_FORWARD)]
    return {
        "outside": list(run.manifest.get("outside") or ()),
        "operations": [name for name in operations if name not in SUM_TO_ONE],
        "others": [kind.replace("_", " ") for kind in kinds],
    }
