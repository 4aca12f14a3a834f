"""The findings of a run of `analyze --images`: visual sinks, and patches of an encoder with a large norm."""

from collections.abc import Iterator
from math import isnan

from sinkscope.errors import counted
from sinkscope.measuring.estimates import outlier_patches, outlier_share, visual_sink_attention, visual_sink_share
from sinkscope.results.findings import AFTER_LAYER, HIGH_NORM, ON_SINKS, PHI, VISUAL, Finding, Outcome
from sinkscope.results.judgment import NotDefined
from sinkscope.results.run import RunData
from sinkscope.verdict.report import coordinates_text, with_interval

SECTION = "Pictures"


def findings(run: RunData) -> Iterator[Finding]:
    if "visual_patch" in run.tables:
        yield from _visual_sinks(run)
    if "encoder_patch" in run.tables:
        yield _outliers(run)


def _visual_sinks(run: RunData) -> Iterator[Finding]:
    about, share = run.manifest["pictures"], visual_sink_share(run)
    of = "massive coordinates" if about["is_massive"] else "largest coordinates, none of them massive,"
    of += f" ({coordinates_text(about['coordinates'])})"
    shown = counted(about["pictures"], "picture")
    sentence = f"{with_interval(share, '.2%')} of the visual tokens of {shown} are sinks in layers from "
    sentence += f"{AFTER_LAYER} on: φ is above {PHI:g} at the model's {of}; at as many random ones {share.null:.2%}."
    numbers = {"pictures": about["pictures"], "coordinates": tuple(about["coordinates"]), "random": share.null,
        "layer": AFTER_LAYER}  # fmt: skip
    outcome = Outcome.PRESENT if share.low > share.null else Outcome.ABSENT if not share.value else Outcome.UNDECIDED
    try:
        ratio = visual_sink_attention(run)
        sentence += f" The text gives a visual sink {with_interval(ratio, '.2f', ' times')} the attention of another "
        sentence += "visual token" + ("." if isnan(ratio.null) else f", a sink by random ones {ratio.null:.2f} times.")
        numbers |= {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_random": ratio.null}
    except NotDefined:
        pass
    yield Finding("visual-sinks", SECTION, outcome, share.value, threshold=PHI, numbers=numbers, sentence=sentence,
        low=share.low, high=share.high)  # fmt: skip
    heads = run.tables["visual_head"].groupby(["layer", "head"])[["first_mass", "visual_mass", "sink_mass"]].mean()
    first, visual, on_sinks = heads.mean()
    centric = (heads["visual_mass"] >= VISUAL) & (heads["sink_mass"] <= ON_SINKS * heads["visual_mass"])
    sentence = f"The text after a picture gives {first:.1%} of its attention to position 0, "
    sentence += f"{visual:.1%} to visual tokens, and {on_sinks:.1%} to visual sinks. "
    sentence += f"{centric.sum()} of {len(heads)} heads see the picture: they give it at least {VISUAL:g} of their "
    sentence += f"attention, and at most {ON_SINKS:g} of that to sinks."
    numbers = {"first": first, "sinks": on_sinks, "seeing": int(centric.sum()), "heads": len(heads)}
    numbers |= {"visual": VISUAL, "on_sinks": ON_SINKS}
    yield Finding("visual-attention", SECTION, value=visual, numbers=numbers, sentence=sentence)


def _outliers(run: RunData) -> Finding:
    share, table = outlier_share(run), outlier_patches(run)
    special = run.tables["encoder_patch"].query("row < 0")
    last = table[table["layer"] == table["layer"].max()]
    pictures = last["sequence"].nunique()
    sentence = f"After the last layer {with_interval(share, '.2%')} of the patches of "
    sentence += f"{counted(pictures, 'picture')} are outliers, with more than {HIGH_NORM:g} times the median patch's "
    sentence += f"norm; the largest has {last['ratio'].max():.2f} times."
    numbers = {"pictures": pictures, "largest": last["ratio"].max()}
    by_layer = table.groupby("layer")["is_outlier"].mean()
    if by_layer.max() > share.value:
        sentence += f" Most are after layer {by_layer.idxmax()}: {by_layer.max():.2%}."
        numbers |= {"layer": int(by_layer.idxmax()), "most": by_layer.max()}
    if len(special):
        mass = special.groupby(["layer", "sequence"])["mass"].sum().mean()
        sentence += f" {mass:.1%} of the attention goes to CLS and registers, mean over layers."
        numbers["special"] = mass
    if last["is_outlier"].any():
        own, others = (last.loc[of, "mass"].mean() for of in (last["is_outlier"], ~last["is_outlier"]))
        sentence += f" In the last layer an outlier receives {own / others:.2f} times the attention of another patch."
        numbers["ratio"] = own / others
    outcome = Outcome.PRESENT if share.low > 0 else Outcome.UNDECIDED if share.value else Outcome.ABSENT
    return Finding("outlier-patches", SECTION, outcome, share.value, threshold=HIGH_NORM, numbers=numbers,
        sentence=sentence, low=share.low, high=share.high, is_headline=True)  # fmt: skip
