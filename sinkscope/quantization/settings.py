"""What is quantized in each setting, and how far the search for costly sites goes. Light: verdict and figures read it.

Settings of the whole model are measured on all sequences, the search for the costly sites on the first PROBED:

    full              nothing quantized
    all               every input, weight and output of every linear layer but the LM head
    weights, activations            one of the two
    massive-kept      all but the sites that hold massive activations
    costliest-kept    all but the sites that were found to cost most
    alone             one kind of site quantized by itself, and of the costly kinds one layer
    kept              all but one kind of site, of the costly kinds
"""

FULL, ALL, WEIGHTS, ACTIVATIONS = "full", "all", "weights", "activations"
MASSIVE_KEPT, COSTLIEST_KEPT, ALONE, KEPT = "massive-kept", "costliest-kept", "alone", "kept"

PROBED = 16  # sequences that the search for costly sites looks at
COSTLY = 0.01  # nats per token, 1 % of perplexity, from which quantizing something has a cost
BY_LAYER = 2  # of the costly kinds are looked at layer by layer …
LAYERS = 8  # … in so many layers: those in which most entries become 0
RESTORED = 0.1  # of the cost of quantizing all, that may remain when the costliest sites are kept

ALL_LAYERS = -1
