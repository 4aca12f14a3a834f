"""The settings that `quantize` measures, and the limits of its search for costly sites.

full                    nothing is quantized
all                     every site of the scheme (sites.py)
weights, activations    only weights, or only activations (with keys and values)
kv-cache                only keys and values
massive-kept            all except the sites with massive activations
costliest-kept          all except the sites that were found to cost most
alone                   only one kind of site, or one layer of a costly kind
kept                    all except one of the costly kinds of site

With `--prefix`, every site is quantized except in `full` and `weights`, and
tokens                  outlier tokens are in full precision and left out of the ranges
coordinates             a few coordinates of every tensor are, those with the largest entries
both                    both
prefix                  there is a prefix before every sequence, and its tokens are
rotation                a random rotation of the residual stream is folded into the weights
"""

FULL, ALL, WEIGHTS, ACTIVATIONS, KV_CACHE = "full", "all", "weights", "activations", "kv-cache"
MASSIVE_KEPT, COSTLIEST_KEPT, ALONE, KEPT = "massive-kept", "costliest-kept", "alone", "kept"
TOKENS, COORDINATES, BOTH, PREFIX, ROTATION = "tokens", "coordinates", "both", "prefix", "rotation"

PROBED = 16  # sequences in the search for costly sites
COSTLY = 0.01  # smallest cost that counts as costly, in nats per token (1 % of perplexity)
BY_LAYER = 2  # number of costly kinds that are measured layer by layer
LAYERS = 8  # number of layers measured for each: the layers in which most entries become 0
RESTORED = 0.1  # share of the full cost that may remain when the costliest sites are kept

CARRIES = 0.5  # share of the cost that spared entries must take away to carry most of it

ALL_LAYERS = -1
NO_DRAW = -1
