"""What carries the cost of quantization: few tokens, few coordinates or neither (the table `quantization_split`).

Every setting has all sites of `quantize` quantized, and spares some entries of the activations: outlier tokens, the
largest coordinates, or the tokens of a prefix before each sequence. Spared entries are left out of the ranges, too. A
rotation spares none. Random tokens, coordinates and prefixes, as many, are the controls. Losses are of the same tokens
in all settings, and costs and shares have 95 % intervals from a bootstrap over sequences.

PrefixQuant (Chen et al. 2024) has the rule for outlier tokens and for the prefix.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from sinkscope.commands.quantize.study import Bench, measured_ranges, read, resampled_cost
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.massive import is_massive, median_magnitude
from sinkscope.measuring.subject import position_limit
from sinkscope.measuring.tracer import Tracer
from sinkscope.models.family import vocabulary
from sinkscope.quantization import settings
from sinkscope.quantization.grids import Range
from sinkscope.quantization.rotation import rotated
from sinkscope.quantization.simulation import quantized_sites
from sinkscope.quantization.sites import CACHED, INPUT, SCORES, SOFTMAX, SUM, WEIGHT, Site
from sinkscope.quantization.spared import Spared
from sinkscope.results.statistics import bootstrap
from sinkscope.results.tables import Column, Columns
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import TokenInputs
from sinkscope.text.tokens import check_ids, special_token_ids

OUTLIER = 64.0  # times the median over the tokens of a sequence: PrefixQuant's η
RARE = 0.1  # of the sequences: a single outlier id that is rarer is left out of the prefix
COORDINATES = 8  # spared coordinates of a tensor
DRAWS = 5  # of random tokens, and of random coordinates

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


@dataclass(frozen=True)
class Text:
    """Sequences to read, and the spared tokens of each (T,)."""

    inputs: TokenInputs
    spared: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Arm:
    """A setting, with the text that is evaluated and the text that calibrates the ranges."""

    setting: str
    text: Text
    calibration: Text
    draw: int = settings.NO_DRAW
    coordinates: Mapping[Site, torch.Tensor] = field(default_factory=dict)  # spared ones
    prefix: tuple[int, ...] = ()

    def sparing(self, text: Text) -> Spared:
        return Spared(text.spared, self.coordinates)


class Split:
    """Measures the settings of `quantization_split`."""

    def __init__(self, bench: Bench, calibration: TokenInputs, seed: int, console: Console) -> None:
        self.bench, self.calibration, self.console = bench, calibration, console
        self.inputs = bench.subject.inputs
        loaded, family = bench.subject.loaded, bench.subject.family
        reasons = {
            "it attends in both directions": not family.causal,
            "it is a prefix LM": family.prefix > 0,
            "it has registers before the text": registers_before(loaded.model) > 0,
            "its experts read only some tokens": any("*" in site.kind for site in bench.sites),
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise InputError(f"--prefix does not apply to {loaded.name}: {reason}")
        known = getattr(loaded.tokenizer, "bos_token_id", None)
        configured = getattr(loaded.model.config.get_text_config(), "bos_token_id", None)
        self.bos: int | None = configured if known is None else known
        self.begins_with_bos = all(ids[0] == self.bos for ids in (*self.inputs.sequences, *calibration.sequences))
        self.activations = [site for site in bench.sites if site.part != WEIGHT]
        self.seed, self.drawn = seed, np.random.default_rng(seed)
        self.prefix: tuple[int, ...] = ()
        self.without_rotation = ""  # the reason
        self.rows: list[dict[str, Any]] = []

    def checked(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prefix with the text's own BOS last; InputError if the model cannot read it before the text."""
        model, family = self.bench.subject.loaded.model, self.bench.subject.family
        if not prefix:
            raise InputError("--prefix: it has no token")
        check_ids(prefix, vocabulary(model), "--prefix")
        if self.begins_with_bos and prefix[-1] != self.bos:
            prefix = (*prefix, int(self.bos or 0))
        limit, longest = position_limit(model, family), max(self.inputs.longest, self.calibration.longest)
        if limit is not None and len(prefix) + longest - self.begins_with_bos > limit:
            raise InputError(
                f"--prefix: its {counted(len(prefix), 'token')} and the text are beyond the model's {limit} positions: "
                "take a shorter prefix or --seq-len"
            )
        return prefix

    # --- settings

    def tables(
        self, ranges: Mapping[Site, Range], prefix: tuple[int, ...] | None, draws: int
    ) -> dict[str, pd.DataFrame]:
        """Measure all settings.

        Args:
            ranges: Of all sites, on the calibration sequences.
            prefix: The user's; None: by PrefixQuant's rule, or the most frequent tokens.
            draws: Number of random prefixes.
        """
        print_line(self.console, "splitting the cost: tokens, coordinates, a prefix and a rotation")
        self.weights = {site: known for site, known in ranges.items() if site.part == WEIGHT}
        plain: dict[str, Mapping[Site, Range]] = {settings.FULL: {}, settings.ALL: ranges}
        plain[settings.WEIGHTS] = self.weights
        losses = {setting: self.bench.losses(quantized, self.inputs) for setting, quantized in plain.items()}
        self.full, self.everything = losses[settings.FULL], losses[settings.ALL]
        for setting, measured in losses.items():
            self._note(Arm(setting, Text(self.inputs), Text(self.calibration)), measured, self.full)
        found = [self._outliers(inputs) for inputs in (self.inputs, self.calibration)]
        self._measure_all(list(self._spared(*([_spared_tokens(each) for each in of] for of in found))))
        self.prefix = prefix if prefix is not None else self.checked(self._best(self._candidates(found[1])))
        loaded, length = self.bench.subject.loaded, len(self.prefix)
        ordinary = np.setdiff1d(np.arange(vocabulary(loaded.model)), list(special_token_ids(loaded.tokenizer)))
        random = [tuple(map(int, self.drawn.choice(ordinary, length))) for _ in range(draws)]
        self._measure_all([self._prefixed(self.prefix), *map(self._prefixed, random, range(draws))])
        self.without_rotation = self._rotate()
        return {"quantization_split": pd.DataFrame(self.rows)}

    def _spared(self, tokens: list[np.ndarray], of_calibration: list[np.ndarray]) -> Iterator[Arm]:
        """Yield the arms that spare outlier tokens, coordinates, both, and as many random ones."""
        plain = Text(self.inputs), Text(self.calibration)
        sparing = Text(self.inputs, tokens), Text(self.calibration, of_calibration)
        yield Arm(settings.TOKENS, *sparing)
        peaks = self._peaks(plain[1])
        yield Arm(settings.COORDINATES, *plain, coordinates={site: _largest(peak) for site, peak in peaks.items()})
        peaks = self._peaks(sparing[1])
        yield Arm(settings.BOTH, *sparing, coordinates={site: _largest(peak) for site, peak in peaks.items()})
        for draw in range(DRAWS):
            text, calibration = (Text(one.inputs, [self._others(mask) for mask in one.spared]) for one in sparing)
            yield Arm(settings.TOKENS, text, calibration, draw)
            anywhere = {site: _largest(torch.from_numpy(self.drawn.random(x.shape))) for site, x in peaks.items()}
            yield Arm(settings.COORDINATES, *plain, draw, anywhere)

    def _prefixed(self, prefix: tuple[int, ...], draw: int = settings.NO_DRAW) -> Arm:
        text, calibration = (self._behind(prefix, inputs) for inputs in (self.inputs, self.calibration))
        return Arm(settings.PREFIX, text, calibration, draw, prefix=prefix)

    def _behind(self, prefix: Sequence[int], inputs: TokenInputs) -> Text:
        """Put a prefix before each sequence, in place of its BOS. The same tokens are predicted."""
        own = [ids[self.begins_with_bos :] for ids in inputs.sequences]
        sequences = tuple(np.concatenate([prefix, ids]).astype(np.int64) for ids in own)
        first = len(prefix) + (not self.begins_with_bos)
        spared = [np.arange(len(ids)) < len(prefix) for ids in sequences]
        return Text(replace(inputs, sequences=sequences, first_predicted=first), spared)

    # --- outliers

    def _outliers(self, inputs: TokenInputs) -> list[tuple[np.ndarray, np.ndarray]]:
        """Find the outlier tokens of each sequence in full precision.

        Returns:
            By sequence (layers, T) and (layers, T): whether the largest entry of the token in the input of the last
            linear layer of the MLP is an outlier among the tokens, and whether the layer's output has a massive
            activation at the token.
        """
        subject = self.bench.subject
        family, blocks = subject.family, range(len(subject.family.layer_modules(subject.loaded.model)))
        down: dict[int, Site] = {}
        for site in self.activations:  # in the order of the model, so that the last one of a layer remains
            attention = site.layer >= 0 and family.block(site.layer).attention
            if site.part == INPUT and site.layer >= 0 and not (attention and site.kind.startswith(attention)):
                down[site.layer] = site
        ends = {at: family.block(at).sites.get("layer_out") for at in blocks}
        outputs = [Site(f"{family.layers}.{at}.{end}", SUM, at, "layer_out") for at, end in ends.items() if end]
        with self.bench.tracer() as tracer:
            return [_outliers_of(tracer, [*down.values(), *outputs], ids) for ids in inputs.sequences]

    def _peaks(self, calibration: Text) -> dict[Site, torch.Tensor]:
        """Return the largest magnitude at each coordinate of each activation, of tokens that are not spared."""
        peaks: dict[Site, torch.Tensor] = {}

        def see(site: Site, x: torch.Tensor) -> None:
            of_heads = site.part in CACHED  # (B,Hkv,T,D)
            largest = x.abs().amax((0, 2), keepdim=True) if of_heads else x.abs().flatten(0, -2).amax(0)
            peaks[site] = torch.maximum(peaks[site], largest) if site in peaks else largest

        sites = [site for site in self.activations if site.part not in (SCORES, SOFTMAX)]
        with self.bench.tracer() as tracer:
            read(tracer, sites, calibration.inputs.read, see, Spared(calibration.spared))
        return peaks

    def _others(self, spared: np.ndarray) -> np.ndarray:
        """Draw as many tokens of a sequence that are not spared."""
        free = np.flatnonzero(~spared)
        mask = np.zeros_like(spared)
        mask[self.drawn.choice(free, min(len(free), int(spared.sum())), replace=False)] = True
        return mask

    # --- prefixes

    def _candidates(self, found: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[int, ...]]:
        """Return PrefixQuant's prefix of the calibration sequences, and their most frequent tokens, as many."""
        sequences = self.calibration.sequences
        rule = outlier_prefix([peaks for peaks, _ in found], sequences)
        last = () if self.bos is None else (self.bos,)
        counts = Counter(int(token) for ids in sequences for token in ids[1:])
        length = len(rule) or len(last) == 0
        frequent = tuple(token for token, _ in counts.most_common(length))
        return list(dict.fromkeys(prefix for prefix in ((*rule, *last), (*frequent, *last)) if prefix))

    def _best(self, candidates: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the candidate with the lowest loss on the calibration sequences, with everything quantized."""
        if len(candidates) == 1:
            return candidates[0]
        on_calibration = (self._behind(prefix, self.calibration) for prefix in candidates)
        losses = self._measure([Arm(settings.PREFIX, text, text) for text in on_calibration])
        return min(zip((each.sum() for each in losses), candidates, strict=True))[1]

    # --- measuring

    def _measure_all(self, arms: Sequence[Arm]) -> None:
        for arm, losses in zip(arms, self._measure(arms), strict=True):
            self._note(arm, losses, self.bench.losses({}, arm.text.inputs) if arm.prefix else self.full)

    def _measure(self, arms: Sequence[Arm], weights: Mapping[Site, Range] | None = None) -> list[np.ndarray]:
        """Return the losses of each arm (N,), with weights and all activations that are not spared quantized."""
        with self.bench.tracer() as tracer:
            ranges = [
                measured_ranges(tracer, self.activations, arm.calibration.inputs.read, arm.sparing(arm.calibration))
                for arm in arms
            ]
        with quantized_sites(self.bench.subject.loaded.model, weights or self.weights, self.bench.precision):
            each = zip(arms, ranges, strict=True)
            return [self.bench.losses(known, arm.text.inputs, arm.sparing(arm.text)) for arm, known in each]

    def _rotate(self) -> str:
        """Measure a rotation of the residual stream. Returns the reason if the model cannot be rotated, else ""."""
        subject = self.bench.subject
        arm = Arm(settings.ROTATION, Text(self.inputs), Text(self.calibration))
        try:
            with rotated(subject.loaded.model, subject.family, self.seed):
                full = self.bench.losses({}, self.inputs)
                with self.bench.tracer() as tracer:
                    weights = measured_ranges(tracer, list(self.weights), self.calibration.read[:1])
                self._note(arm, self._measure([arm], weights)[0], full)
        except InputError as error:
            return str(error)
        return ""

    def _note(self, arm: Arm, losses: np.ndarray, full: np.ndarray) -> None:
        predicted = np.array(self.inputs.predicted)
        cost, everything = (
            resampled_cost(x, self.full, predicted, self.inputs.texts) for x in (losses, self.everything)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            found, shares = bootstrap(cost), bootstrap(1 - cost / everything)
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
                "cost": found.value,
                "cost_low": found.low,
                "cost_high": found.high,
                "share": shares.value,
                "share_low": shares.low,
                "share_high": shares.high,
                "full_loss": float(full.sum() / predicted.sum()),
            }
        )


def _outliers_of(tracer: Tracer, sites: Iterable[Site], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
            peaks.append((largest > OUTLIER * largest.median()).numpy(force=True))

    read(tracer, sites, [ids], see)
    return np.array(peaks), np.array(massive)


def _spared_tokens(found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """(layers, T) and (layers, T) → (T,): outlier tokens of a sequence, and always position 0."""
    spared = np.logical_or.reduce(np.concatenate(found), axis=0)
    spared[0] = True
    return spared


def _largest(peaks: torch.Tensor) -> torch.Tensor:
    """Return a mask of the COORDINATES largest entries."""
    mask = torch.zeros(peaks.numel(), dtype=torch.bool, device=peaks.device)
    mask[peaks.flatten().topk(min(COORDINATES, peaks.numel())).indices] = True
    return mask.view(peaks.shape)


def outlier_prefix(outliers: Sequence[np.ndarray], sequences: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return PrefixQuant's prefix without its last token, a BOS: the most frequent outlier ids, except at position 0.

    Their number is the mean number of outliers of a sequence, position 0 included, in the layer with most, rounded up.

    Args:
        outliers: By sequence (layers, T): whether a token is an outlier.
        sequences: Their token ids.
    """
    number = math.ceil(np.mean([mask.sum(1) for mask in outliers], axis=0).max())
    counts = Counter(
        int(ids[at]) for mask, ids in zip(outliers, sequences, strict=True) for _, at in np.argwhere(mask) if at
    )
    if len(counts) == 1 and counts.total() < RARE * len(sequences):
        return ()
    return tuple(token for token, _ in counts.most_common(number))
