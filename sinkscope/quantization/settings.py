"""The settings that `quantize` measures, and the limits of its search for costly sites.

full                    nothing is quantized
all                     every site of the scheme (sites.py)
weights, activations    one of the two; keys and values are activations
kv-cache                keys and values alone
massive-kept            all but the sites that hold massive activations
costliest-kept          all but the sites that were found to cost most
alone                   one kind of site, and of the costly kinds one layer
kept                    all but one of the costly kinds of site
"""

FULL, ALL, WEIGHTS, ACTIVATIONS, KV_CACHE = "full", "all", "weights", "activations", "kv-cache"
MASSIVE_KEPT, COSTLIEST_KEPT, ALONE, KEPT = "massive-kept", "costliest-kept", "alone", "kept"

PROBED = 16  # sequences of the search for costly sites
COSTLY = 0.01  # nats per token (1 % of perplexity) from which something is costly
BY_LAYER = 2  # so many of the costly kinds are measured layer by layer …
LAYERS = 8  # … in so many layers: those in which most entries become 0
RESTORED = 0.1  # share of the cost of quantizing all that may remain when the costliest sites are kept

ALL_LAYERS = -1
