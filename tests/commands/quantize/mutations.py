"""Errors in `quantize`, each of which a test in this folder notices: see tests/mutations.py."""

ENGINE = "sinkscope.measuring.engine"

MUTATIONS = [
    ("cost: its sign", ENGINE, "resampled_cost", "(losses - base)", "(base - losses)"),
    ("ranges: the narrowest of all texts", "study", "measured_ranges",
     "min(part.low for part in parts)", "max(part.low for part in parts)"),
    ("search: the finest sites", "study", "QuantizationStudy._costliest_sites",
     "-self.roundings[site].zeroed", "self.roundings[site].zeroed"),
    ("search: the cheapest kinds", "study", "QuantizationStudy._costliest_sites", "-of_roles[r]", "of_roles[r]"),
    ("search: the cheapest sites first", "study", "QuantizationStudy._costliest_sites", "-costs[site]", "costs[site]"),
    ("search: what costs nothing", "study", "QuantizationStudy._costliest_sites", "costs[site] > 0", "costs[site] < 0"),
    ("search: a kind alone in place of all others", "study", "QuantizationStudy._costliest_sites",
     "self._without(by_role[role])", "{site: self.ranges[site] for site in by_role[role]}"),
    ("kept sites: one more each time", "study", "QuantizationStudy._keep_costliest", "2 * count", "1 + count"),
    ("split: the share that is left", "split", "Split._note", "1 - costs / everything", "costs / everything"),
    ("split: random tokens are the spared ones", "split", "Split._random_tokens", "(~spared)", "(spared)"),
    ("split: the smallest coordinates", "split", "_top_entries", "peaks.numel()))", "peaks.numel()), largest=False)"),
    ("split: the peak of the first text", "split", "Split._peaks",
     "torch.maximum(peaks[site], largest)", "peaks[site]"),
    ("split: the worse prefix", "split", "Split._best_prefix", "min(zip(", "max(zip("),
    ("split: the bound of an interval", "findings", "_split", "low[name] >= CARRIES", "cost[name] >= CARRIES"),
    ("split: random tokens are not compared", "findings", "_split", " and cost[name] > random[name].max()", ""),
    ("prefix: random ones that are worse", "findings", "_prefix_and_rotation",
     'random["loss"] <= row["loss"]', 'random["loss"] >= row["loss"]'),
    ("restored: any share", "findings", "_outlier_sites", "share >= threshold", "share > 0"),
    ("recipe: symmetric activations", "findings", "llm_compressor_recipe",
     "is_symmetric: bool = False", "is_symmetric: bool = True"),
]  # fmt: skip
