"""What carries the cost of quantization: few tokens, few coordinates or neither (the table `quantization_split`).

Every setting has all sites of `quantize` quantized, and spares some entries of the activations: outlier tokens, the
largest coordinates, or the tokens of a prefix before each sequence. Spared entries are left out of the ranges, too. A
rotation spares none. The controls are equally many random tokens, coordinates and prefixes. Losses are of the same
tokens in all settings, and costs and shares have 95 % intervals from a bootstrap over sequences.

PrefixQuant (Chen et al. 2024) has the rule for outlier tokens and for the prefix.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinkscope.commands.quantize.prefixes import OUTLIER_RATIO, Prefixes, SparingText, outlier_prefix
from sinkscope.commands.quantize.study import Simulation, measured_ranges, read
from sinkscope.errors import InputError
from sinkscope.measuring.engine import Setting, resampled_cost
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.massive import is_massive, median_magnitude
from sinkscope.measuring.tracer import Tracer
from sinkscope.models.family import embedding_weight
from sinkscope.models.rotation import random_rotation, rotated
from sinkscope.quantization import settings
from sinkscope.quantization.grids import Range
from sinkscope.quantization.simulation import quantized_sites
from sinkscope.quantization.sites import CACHED, INPUT, SCORES, SOFTMAX, SUM, WEIGHT, Site
from sinkscope.quantization.spared import Spared, random_tokens
from sinkscope.results.statistics import bootstrap
from sinkscope.results.tables import Column, Columns
from sinkscope.text.inputs import TokenInputs

COORDINATES = 8  # spared coordinates of a tensor
RANDOM_DRAWS = 5  # draws of random tokens, and of random coordinates

SPLIT_TABLES: dict[str, Columns] = {
    "quantization_split": (
        Column("setting", "what is spared or changed: see quantization/settings.py", kind="text"),
        Column("draw", "number of the random control; -1: no control", kind="whole"),
        Column("tokens", "spared tokens of a sequence, mean"),
        Column("coordinates", "spared coordinates of each tensor", kind="whole"),
        Column("prefix", "ids of the tokens before each sequence", kind="text"),
        Column("sequences", "number of sequences measured", kind="whole"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss minus the loss in full precision without a change", "nats per token"),
        Column("cost_low", "lower end of its interval", "nats per token"),
        Column("cost_high", "upper end of its interval", "nats per token"),
        Column("share", "of the cost of quantizing everything that is gone"),
        Column("share_low", "lower end of its interval"),
        Column("share_high", "upper end of its interval"),
        Column("full_loss", "loss in full precision with the same prefix or rotation", "nats per token"),
    ),
}


Masks = tuple[np.ndarray, np.ndarray]  # masks of the outlier tokens of a sequence, (layers, T) each


@dataclass(frozen=True)
class SplitArm:
    """A setting, with the text that is evaluated and the text that calibrates the ranges."""

    setting: str
    text: SparingText
    calibration: SparingText
    draw: int = settings.NO_DRAW
    coordinates: Mapping[Site, torch.Tensor] = field(default_factory=dict)  # spared ones
    prefix: tuple[int, ...] = ()


class Split:
    """Measures the settings of `quantization_split`."""

    def __init__(self, simulation: Simulation, calibration: TokenInputs, seed: int) -> None:
        self.simulation, self.calibration = simulation, calibration
        self.inputs = simulation.subject.inputs
        if any("*" in site.kind for site in simulation.sites):
            raise InputError(
                f"{simulation.subject.loaded.name} reads only some tokens in its experts: take no --prefix"
            )
        self.prefixes = Prefixes(simulation.subject, calibration)
        self.activations = [site for site in simulation.sites if site.part != WEIGHT]
        self.seed, self.drawn = seed, np.random.default_rng(seed)
        self.prefix: tuple[int, ...] = ()
        self.without_rotation = ""  # the reason
        self.rows: list[dict[str, Any]] = []

    def tables(
        self, ranges: Mapping[Site, Range], prefix: tuple[int, ...] | None, draws: int
    ) -> dict[str, pd.DataFrame]:
        """Measure all settings.

        Args:
            ranges: Of all sites, on the calibration sequences.
            prefix: The user's; None: by PrefixQuant's rule, or the most frequent tokens.
            draws: Number of random prefixes.
        """
        self.weights = {site: known for site, known in ranges.items() if site.part == WEIGHT}
        plain = {settings.FULL: {}, settings.ALL: ranges, settings.WEIGHTS: self.weights}
        measured = self._losses([self.simulation.setting(quantized) for quantized in plain.values()])
        self.full, self.everything, _ = measured
        for setting, losses in zip(plain, measured, strict=True):
            arm = SplitArm(setting, SparingText(self.inputs), SparingText(self.calibration))
            self._note(arm, losses, self.full)
        outliers, of_calibration = (self._outliers(inputs) for inputs in (self.inputs, self.calibration))
        self._measure_and_note(self._sparing_arms(outliers, of_calibration))
        self.prefix = self._best_prefix([peaks for peaks, _ in of_calibration]) if prefix is None else prefix
        random = [self.prefixes.random(len(self.prefix), self.drawn) for _ in range(draws)]
        self._measure_and_note([self._prefixed(self.prefix), *map(self._prefixed, random, range(draws))])
        self._rotate()
        return {"quantization_split": pd.DataFrame(self.rows)}

    # --- settings

    def _sparing_arms(self, outliers: Sequence[Masks], of_calibration: Sequence[Masks]) -> list[SplitArm]:
        """Return the arms that spare outlier tokens, coordinates, both, or equally many random ones."""
        plain = SparingText(self.inputs), SparingText(self.calibration)
        tokens, calibration_tokens = (
            [np.logical_or.reduce(np.concatenate(masks), axis=0) for masks in of_sequences]
            for of_sequences in (outliers, of_calibration)
        )
        for mask in (*tokens, *calibration_tokens):
            mask[0] = True  # always
        sparing = SparingText(self.inputs, tokens), SparingText(self.calibration, calibration_tokens)
        arms = [SplitArm(settings.TOKENS, *sparing)]
        for setting, texts in ((settings.COORDINATES, plain), (settings.BOTH, sparing)):
            peaks = self._peaks(texts[1])
            arms.append(SplitArm(setting, *texts, coordinates={site: _top_entries(x) for site, x in peaks.items()}))
        for draw in range(RANDOM_DRAWS):
            random = [
                SparingText(inputs, [random_tokens(mask, self.drawn) for mask in spared]) for inputs, spared in sparing
            ]
            arms.append(SplitArm(settings.TOKENS, random[0], random[1], draw))
            anywhere = {site: _top_entries(torch.from_numpy(self.drawn.random(x.shape))) for site, x in peaks.items()}
            arms.append(SplitArm(settings.COORDINATES, *plain, draw, anywhere))
        return arms

    def _prefixed(self, prefix: tuple[int, ...], draw: int = settings.NO_DRAW) -> SplitArm:
        text, calibration = (self.prefixes.before(prefix, inputs) for inputs in (self.inputs, self.calibration))
        return SplitArm(settings.PREFIX, text, calibration, draw, prefix=prefix)

    def _best_prefix(self, outliers: Sequence[np.ndarray]) -> tuple[int, ...]:
        """Return the better prefix: PrefixQuant's, or equally many of the most frequent calibration tokens.

        The better prefix has the lower loss on the calibration sequences, with everything quantized. `outliers` are as
        in `outlier_prefix`.
        """
        sequences = self.calibration.sequences
        rule = outlier_prefix(outliers, sequences)
        last = () if self.prefixes.bos is None else (self.prefixes.bos,)
        counts = Counter(int(token) for ids in sequences for token in ids[1:])
        frequent = tuple(token for token, _ in counts.most_common(len(rule) or len(last) == 0))
        candidates = list(dict.fromkeys(prefix for prefix in ((*rule, *last), (*frequent, *last)) if prefix))
        if len(candidates) > 1:
            texts = [self.prefixes.before(prefix, self.calibration) for prefix in candidates]
            losses = self._measure([SplitArm(settings.PREFIX, text, text) for text in texts])
            candidates = [min(zip((each.sum() for each in losses), candidates, strict=True))[1]]
        return self.prefixes.checked(candidates[0])

    # --- outliers

    def _outliers(self, inputs: TokenInputs) -> list[Masks]:
        """Find the outlier tokens of each sequence in full precision.

        Returns:
            By sequence (layers, T) and (layers, T): whether the largest entry of the token in the input of the last
            linear layer of the MLP is an outlier among the tokens, and whether the layer's output has a massive
            activation at the token.
        """
        subject = self.simulation.subject
        family, down = subject.family, dict[int, Site]()
        for site in self.activations:  # in the order of the model, so that the last one of a layer remains
            attention = site.layer >= 0 and family.block(site.layer).attention
            if site.part == INPUT and site.layer >= 0 and not (attention and site.kind.startswith(attention)):
                down[site.layer] = site
        ends = [
            family.block(layer).sites.get("layer_out")
            for layer in range(len(family.layer_modules(subject.loaded.model)))
        ]
        outputs = [
            Site(f"{family.layers}.{layer}.{end}", SUM, layer, "layer_out") for layer, end in enumerate(ends) if end
        ]
        with self.simulation.tracer() as tracer:
            return [_outliers_of(tracer, [*down.values(), *outputs], ids) for ids in inputs.sequences]

    def _peaks(self, calibration: SparingText) -> dict[Site, torch.Tensor]:
        """Return the largest magnitude at each coordinate of each activation, of tokens that are not spared."""
        peaks: dict[Site, torch.Tensor] = {}

        def see(site: Site, x: torch.Tensor) -> None:
            of_heads = site.part in CACHED  # (B,Hkv,T,D)
            largest = x.abs().amax((0, 2), keepdim=True) if of_heads else x.abs().flatten(0, -2).amax(0)
            peaks[site] = torch.maximum(peaks[site], largest) if site in peaks else largest

        sites = [site for site in self.activations if site.part not in (SCORES, SOFTMAX)]
        with self.simulation.tracer() as tracer:
            read(tracer, sites, calibration.inputs.read, see, Spared(calibration.spared))
        return peaks

    # --- measuring

    def _measure_and_note(self, arms: Sequence[SplitArm]) -> None:
        behind_prefixes = [self.simulation.setting({}, inputs=arm.text.inputs) for arm in arms if arm.prefix]
        full = iter(self._losses(behind_prefixes))
        for arm, losses in zip(arms, self._measure(arms), strict=True):
            self._note(arm, losses, next(full) if arm.prefix else self.full)

    def _measure(self, arms: Sequence[SplitArm], weights: Mapping[Site, Range] | None = None) -> list[np.ndarray]:
        """Return the losses of each arm (N,), with weights and all activations that are not spared quantized."""
        simulation = self.simulation
        with simulation.tracer() as tracer:
            calibrations = [
                (arm.calibration.inputs.read, Spared(arm.calibration.spared, arm.coordinates)) for arm in arms
            ]
            ranges = [measured_ranges(tracer, self.activations, *calibration) for calibration in calibrations]
        with quantized_sites(simulation.subject.loaded.model, weights or self.weights, simulation.precision):
            return self._losses(
                [
                    simulation.setting(known, Spared(arm.text.spared, arm.coordinates), inputs=arm.text.inputs)
                    for arm, known in zip(arms, ranges, strict=True)
                ]
            )

    def _losses(self, run: Sequence[Setting]) -> list[np.ndarray]:
        return [done.losses.numpy() for done in self.simulation.run(run)]

    def _rotate(self) -> None:
        """Measure a rotation of the residual stream, or keep the reason why the model cannot be rotated."""
        simulation = self.simulation
        try:
            model = simulation.subject.loaded.model
            rotation = random_rotation(embedding_weight(model).shape[1], self.seed)
            with rotated(model, simulation.subject.family, rotation):
                (full,) = self._losses([simulation.setting({})])
                with simulation.tracer() as tracer:
                    weights = measured_ranges(tracer, list(self.weights), self.calibration.read[:1])
                arm = SplitArm(settings.ROTATION, SparingText(self.inputs), SparingText(self.calibration))
                self._note(arm, self._measure([arm], weights)[0], full)
        except InputError as error:
            self.without_rotation = str(error)

    def _note(self, arm: SplitArm, losses: np.ndarray, full: np.ndarray) -> None:
        predicted = np.array(self.inputs.predicted)
        costs, everything = (
            resampled_cost(x, self.full, predicted, self.inputs.texts) for x in (losses, self.everything)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            cost, share = bootstrap(costs), bootstrap(1 - costs / everything)
        loss = float(losses.sum() / predicted.sum())
        spared = [int(mask.sum()) for mask in arm.text.spared]
        self.rows.append(
            {
                "layer": settings.ALL_LAYERS,
                "setting": arm.setting,
                "draw": arm.draw,
                "tokens": float(np.mean(spared)) if spared else 0.0,
                "coordinates": COORDINATES * bool(arm.coordinates),
                "prefix": " ".join(map(str, arm.prefix)),
                "sequences": len(self.inputs),
                "loss": loss,
                "perplexity": perplexity(loss),
                "full_loss": float(full.sum() / predicted.sum()),
                **cost.as_columns("cost"),
                **share.as_columns("share"),
            }
        )


def _outliers_of(tracer: Tracer, sites: Iterable[Site], ids: np.ndarray) -> Masks:
    """Return the outliers of one sequence; see `Split._outliers`."""
    peaks, massive = [np.zeros(len(ids), bool)], [np.zeros(len(ids), bool)]

    def see(site: Site, x: torch.Tensor) -> None:
        magnitudes = x.abs().flatten(0, -2)
        if len(magnitudes) != len(ids):  # several copies of the stream
            return
        if site.part == SUM:
            massive.append(is_massive(magnitudes, median_magnitude(x)).any(-1).numpy(force=True))
        else:
            largest = magnitudes.amax(-1)
            peaks.append((largest > OUTLIER_RATIO * largest.median()).numpy(force=True))

    read(tracer, sites, [ids], see)
    return np.array(peaks), np.array(massive)


def _top_entries(peaks: torch.Tensor) -> torch.Tensor:
    """Return a mask of the COORDINATES largest entries."""
    mask = torch.zeros(peaks.numel(), dtype=torch.bool, device=peaks.device)
    mask[peaks.flatten().topk(min(COORDINATES, peaks.numel())).indices] = True
    return mask.view(peaks.shape)
