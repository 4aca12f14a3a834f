"""From static ranges to the sites whose quantization costs most: the tables of `quantize`.

Settings of the whole model are measured on all sequences, the search for the costly sites on the first PROBED.
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console

from sinkscope.errors import counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.quantized import Bench, Measured
from sinkscope.quantization import settings
from sinkscope.quantization.attention import CACHED
from sinkscope.quantization.ranges import Range, Rounding
from sinkscope.quantization.sites import WEIGHT, Site
from sinkscope.results.tables import Column, Columns
from sinkscope.text.inputs import TokenInputs

Ranges = Mapping[Site, Range]

LINEAR = Column("site", "kind of module, as mlp.down_proj, or mid or layer_out of a residual sum", kind="text")
PART = Column(
    "part",
    "input, weight or output; scheme full: also residual sum, scores, softmax output; KV cache: keys, values",
    kind="text",
)
QUANTIZATION_TABLES: dict[str, Columns] = {
    "quantization": (
        Column("setting", "what is quantized: quantization/settings.py", kind="text"),
        LINEAR,
        PART,
        Column("quantized", "how many sites are quantized", kind="whole"),
        Column("kept", "sites in full precision, where they were searched for", kind="text"),
        Column("sequences", "how many sequences it was measured on", kind="whole"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss above that of full precision on the same sequences", "nats per token"),
        Column("max_inf_norm", "largest absolute entry over sites and layers; NaN where it was not measured"),
        Column("kurtosis", "mean over sites and layers; NaN where it was not measured"),
    ),
    "quantization_sites": (
        LINEAR,
        PART,
        Column("path", "of the module in the model, or the address of a residual sum", kind="text"),
        Column("low", "smallest entry on the calibration sequences"),
        Column("high", "largest entry"),
        Column("median_abs", "median of a sequence's absolute entries, or of 64 rows of attention, mean over these"),
        Column("max_abs", "largest absolute entry"),
        Column("is_massive", "whether a sequence has a massive activation here; only of hidden states", kind="truth"),
        Column("step", "of the grid; of several, one a channel or a token, the mean"),
        Column("zeroed", "share of the entries other than 0 that the grid makes 0"),
        Column("sqnr", "signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x-x̂)²", "dB"),
    ),
}


@dataclass
class Study:
    """Measures setting after setting; each is a row of the table `quantization`."""

    inputs: TokenInputs
    bench: Bench
    ranges: Ranges
    roundings: Mapping[Site, Rounding]
    console: Console
    rows: list[dict[str, Any]] = field(default_factory=list)

    def tables(self) -> dict[str, pd.DataFrame]:
        print_line(self.console, f"{self.bench.precision} on {counted(len(self.inputs), 'sequence')}")
        self._whole_model()
        print_line(self.console, f"looking for the sites that cost most on {counted(len(self.probes), 'sequence')}")
        self._keep_costliest(self._costliest_sites(self._costly_kinds()))
        return {"quantization": pd.DataFrame(self.rows), "quantization_sites": self._sites()}

    # --- what is measured

    def _whole_model(self) -> None:
        weights = {site for site in self.ranges if site.part == WEIGHT}
        massive = {site for site, known in self.ranges.items() if known.is_massive}
        self._note(settings.FULL, {}, outliers=True)
        self._note(settings.ALL, self.ranges, outliers=True)
        self._note(settings.WEIGHTS, self._without(self.ranges.keys() - weights))
        self._note(settings.ACTIVATIONS, self._without(weights))
        if cached := {site for site in self.ranges if site.part in CACHED}:
            self._note(settings.KV_CACHE, {site: self.ranges[site] for site in cached})
        if massive:
            self._note(settings.MASSIVE_KEPT, self._without(massive))
        if len(self.probes) < len(self.inputs):
            self._note(settings.FULL, {}, self.probes)
            self._note(settings.ALL, self.ranges, self.probes)

    def _costly_kinds(self) -> list[str]:
        """Quantize each kind of site alone, and all but each costly kind. Returns the costly ones, costliest first."""
        costs: dict[str, float] = {}
        for role in dict.fromkeys(site.role for site in self.ranges):
            alone = {site: known for site, known in self.ranges.items() if site.role == role}
            costs[role] = self._note(settings.ALONE, alone, self.probes, next(iter(alone)))
        costly = sorted((role for role in costs if costs[role] >= settings.COSTLY), key=lambda role: -costs[role])
        for role in costly:
            kept = {site for site in self.ranges if site.role == role}
            self._note(settings.KEPT, self._without(kept), self.probes, next(iter(kept)))
        return costly

    def _costliest_sites(self, costly: list[str]) -> list[Site]:
        """Quantize single layers of the costliest kinds. Returns the sites that have a cost, costliest first."""
        costs: dict[Site, float] = {}
        for role in costly[: settings.BY_LAYER]:
            sites = [site for site in self.ranges if site.role == role]
            coarsest = sorted(sites, key=lambda site: -self.roundings[site].zeroed)[: settings.LAYERS]
            by_layer = sorted(coarsest, key=lambda site: site.layer)
            measured = self.bench.measure_each([{site: self.ranges[site]} for site in by_layer], self.probes)
            for site, alone in zip(by_layer, measured, strict=True):
                costs[site] = self._write(settings.ALONE, alone, 1, self.probes, site, site.layer)
        return sorted((site for site in costs if costs[site] > 0), key=lambda site: -costs[site])

    def _keep_costliest(self, costliest: list[Site]) -> None:
        """Keep one, two, four … of them in full precision until nearly all of the cost is gone, then measure the last
        choice on all sequences.
        """
        whole = self._row(settings.ALL, self.probes)["cost"]
        if not costliest or whole < settings.COSTLY:
            return
        count, cost = 0, math.inf
        while cost > settings.RESTORED * whole and count < len(costliest):
            count = min(max(1, 2 * count), len(costliest))
            kept = costliest[:count]
            cost = self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), self.probes, kept=kept)
        if len(self.probes) < len(self.inputs):
            self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), kept=kept)

    @property
    def probes(self) -> TokenInputs:
        return self.inputs.part(0, settings.PROBED)

    def _without(self, kept: Set[Site]) -> dict[Site, Range]:
        return {site: known for site, known in self.ranges.items() if site not in kept}

    # --- how it is written down

    def _note(
        self,
        setting: str,
        ranges: Ranges,
        inputs: TokenInputs | None = None,
        site: Site | None = None,
        kept: Iterable[Site] = (),
        outliers: bool = False,
    ) -> float:
        """Measure one setting, as a row. Returns its cost: the loss above full precision's on the same sequences."""
        inputs = inputs or self.inputs
        measured = self.bench.measure(ranges, inputs, outliers)
        return self._write(setting, measured, len(ranges), inputs, site, kept=kept)

    def _write(
        self,
        setting: str,
        measured: Measured,
        quantized: int,
        inputs: TokenInputs,
        site: Site | None = None,
        layer: int = settings.ALL_LAYERS,
        kept: Iterable[Site] = (),
    ) -> float:
        """The row of a setting. Returns its cost."""
        cost = 0.0 if setting == settings.FULL else measured.loss - self._row(settings.FULL, inputs)["loss"]
        self.rows.append(
            {
                "layer": layer,
                "setting": setting,
                "site": site.kind if site else "",
                "part": site.part if site else "",
                "quantized": quantized,
                "kept": ", ".join(str(site) for site in kept),
                "sequences": len(inputs),
                "cost": cost,
                "perplexity": measured.perplexity,
                **asdict(measured),
            }
        )
        return cost

    def _row(self, setting: str, inputs: TokenInputs) -> dict[str, Any]:
        return next(row for row in self.rows if row["setting"] == setting and row["sequences"] == len(inputs))

    def _sites(self) -> pd.DataFrame:
        rows = [
            {"layer": site.layer, "site": site.kind, "part": site.part, "path": site.path, "max_abs": known.max_abs}
            | {name: getattr(known, name) for name in ("low", "high", "median_abs", "is_massive")}
            | asdict(self.roundings[site])
            for site, known in self.ranges.items()
        ]
        return pd.DataFrame(rows)
