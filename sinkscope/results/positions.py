"""What a run says of its model's positions, and whether equal tokens stay equal under them (WSE §3.3)."""

from sinkscope.models.family import ATTENTION, FEED_FORWARD, NO_POSITIONS, NOT_RUN, ON_LOGITS
from sinkscope.results.run import RunData
from sinkscope.retrofits.operation import SUM_TO_ONE

ADDED = {"learned", "sinusoidal"}  # to the embeddings, where they tell equal tokens apart
WITHIN_ATTENTION = {"rotary", *ON_LOGITS, NO_POSITIONS}  # which alone tells nothing apart


def kinds_of_positions(run: RunData) -> set[str]:
    family = run.manifest["family"]
    return set(family.get("layer_positions") or (family["positions"],)) - {""}


def mixing_layers(run: RunData) -> list[str]:
    """The kinds of those layers that mix tokens, and not by attention."""
    kinds = run.manifest["family"].get("kinds") or ()
    return [kind.replace("_", " ") for kind in kinds if kind not in (ATTENTION, NOT_RUN, *FEED_FORWARD)]


def unequal(run: RunData) -> dict[str, list[str]]:
    """Why equal tokens do not stay equal, whatever their positions are: of each of three reasons what it is of."""
    return {"outside": outside(run), "operations": unequal_weights(run), "others": mixing_layers(run)}


def unequal_weights(run: RunData) -> list[str]:
    """The attention operations whose weights sum to more the more tokens a query sees, though all are equal."""
    return [name for name in run.manifest["model"].get("operations") or () if name not in SUM_TO_ONE]


def outside(run: RunData) -> list[str]:
    """What is attended to besides the text: it takes more of the attention of a query that sees few tokens."""
    return list(run.manifest.get("outside") or ())
