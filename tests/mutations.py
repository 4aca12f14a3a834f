"""Mutation testing, run by hand: single errors in the core and in the commands, and whether the tests detect them.

Every mutation replaces one piece of one function's source (an operator, an index, a sign, an axis, a mask) and runs the
test files that cover the function. All runs are forks of one process that has imported the package and the tests, so
that a mutation costs no more than the tests up to the first failure:

    OMP_NUM_THREADS=1 python tests/mutations.py              # all mutations, about half an hour on one core
    OMP_NUM_THREADS=1 python tests/mutations.py causal mass  # mutations with one of these words, in this order

Those of the core are below, those of a command in `tests/commands/NAME/mutations.py`: `MUTATIONS`, rows of a name, a
module of the command's folder (or a whole name, `sinkscope.…`), a function, the text and its replacement. The tests of
a command's mutations are those in its folder. Tests of real models are left out. A mutation is killed if a test fails
that passes without it, and has survived if all tests pass. It is an error if its piece of source does not occur exactly
once in the function, or if the test fails without it, too.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import inspect
import os
import runpy
import sys
import tempfile
import time
import types
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.main import pytest_runtestloop as run_tests

ROOT = Path(__file__).parents[1]
syntax_tree = cache(ast.parse)

KERNELS = "sinkscope.attention.kernels"
WEIGHTS = "sinkscope.attention.weights"
OPERATIONS = "sinkscope.attention.kernels"
STREAMING = "sinkscope.attention.streaming"
TAPS = "sinkscope.attention.taps"
POSITIONS = "sinkscope.attention.position_kinds"
TRACER = "sinkscope.measuring.tracer"
LOSSES = "sinkscope.measuring.losses"
OBSERVABLES = "sinkscope.measuring.observables"
FIGURES = "sinkscope.figures"
PICTURES = "sinkscope.measuring.pictures"
SPARED = "sinkscope.quantization.spared"
SUMMARY = "sinkscope.measuring.summary"
DECODING, WATCHING = "sinkscope.measuring.decoding", "sinkscope.measuring.watching"
OF_RUN = "sinkscope.measuring.estimates"
OF_METRICS, OF_HEADS = "sinkscope.results.metric_estimates", "sinkscope.results.head_differences"
CALLBACK = "sinkscope.measuring.callback"
ESTIMATES = "sinkscope.results.statistics"
EFFECT_INTERVALS = "sinkscope.commands.intervene.findings"
SMOOTHING, NORMS = "sinkscope.quantization.smoothing", "sinkscope.models.norms"
ROUNDING, FORMATS = "sinkscope.quantization.rounding", "sinkscope.quantization.formats"
INTERVENTIONS = "sinkscope.interventions"
ANALYSIS, PROBES = "sinkscope.verdict.analysis", "sinkscope.verdict.probes"

# the tests that cover each part, by file or folder: never the single test that is expected to fail
ATTENTION_TESTS = ("tests/attention", "tests/measuring/test_observables.py", "tests/measuring/test_tracer.py")
OPERATION_TESTS = ("tests/attention", "tests/retrofits/test_operations.py", "tests/retrofits/test_retrofits.py")
STREAMING_TESTS = ("tests/measuring/test_streaming.py",)
RETROFIT_TESTS = ("tests/retrofits/test_retrofits.py",)
TRACER_TESTS = (
    "tests/measuring/test_tracer.py",
    "tests/measuring/test_gate.py",
    "tests/measuring/test_outside.py",
)
OBSERVABLE_TESTS = (
    "tests/measuring/test_observables.py",
    "tests/measuring/test_by_sequence.py",
    "tests/measuring/test_outside.py",
    "tests/measuring/test_tracer.py",
)
GRADIENT_TESTS = ("tests/measuring/test_gradient.py",)
BRANCH_TESTS = ("tests/models/test_every_model.py",)  # these test branches that a model scales or adds up from several
BIAS_TESTS = ("tests/measuring/test_query_bias.py",)
ESTIMATE_TESTS = (
    "tests/commands/claims/test_claims_levels.py",
    "tests/commands/intervene/test_effects.py",
)
SEQUENCE_TESTS = ("tests/results/test_sequences.py",)
METRIC_ESTIMATE_TESTS = ("tests/results/test_metric_estimates.py",)
SMOOTHING_TESTS = ("tests/quantization/test_smoothing.py",)
ROUNDING_TESTS = ("tests/quantization/test_rounding.py",)
METRIC_TESTS = ("tests/results/test_metrics.py",)
VERDICT_TESTS = ("tests/verdict",)
FORMAT_TESTS = ("tests/commands/train/test_retrofit_table.py",)  # of tables as text, Markdown and LaTeX
FIGURE_TESTS = ("tests/figures/test_figures.py",)
PICTURE_TESTS = ("tests/measuring/test_pictures.py",)
SUMMARY_TESTS = ("tests/measuring/test_summary.py",)
OF_RUN_TESTS = ("tests/measuring/test_estimates.py",)
CALLBACK_TESTS = ("tests/measuring/test_callback.py",)
STATE_TESTS = ("tests/measuring/test_states.py",)
NEURON_TESTS = ("tests/measuring/test_neurons_and_heads.py",)
IDENTITY_TESTS = ("tests/measuring/test_gradient_identities.py",)
EQUAL_TOKEN_TESTS = ("tests/measuring/test_equal_tokens.py",)
MASKED_TESTS = ("tests/commands/train/test_masked.py",)
DECODING_TESTS = ("tests/measuring/test_decoding.py",)
SINK_OUTPUT_TESTS = ("tests/measuring/test_sink_output.py",)
TEXT_TESTS = ("tests/text",)
SPARED_TESTS = ("tests/quantization/test_spared.py",)
INTERVENTION_TESTS = ("tests/interventions", "tests/commands/intervene/test_intervene.py")


class Mutation(NamedTuple):
    """One error: the text `old`, which occurs once in this function of this module, becomes `new`."""

    name: str
    module: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutations(tests: tuple[str, ...], *rows: tuple[str, str, str, str, str]) -> list[Mutation]:
    return [Mutation(*row, tests) for row in rows]


MUTATIONS = [
    *_mutations(
        ATTENTION_TESTS,
        ("causal: a query does not see its own key", KERNELS, "causal", "return row >= ", "return row > "),
        ("heads: another key head", KERNELS, "repeat_heads", "dim=1)", "dim=1).roll(1, 1)"),
        ("heads: axes of a product", KERNELS, "grouped_matmul",
         "view(batch, heads, rows, right.shape[-1])", "view(batch, rows, heads, right.shape[-1]).transpose(1, 2)"),
        ("softcap: not scaled back", KERNELS, "raw_logits", "call.softcap * (logits", "(logits"),
        ("cache: empty places are seen", KERNELS, "masked_logits",
         "ahead = 0 if queries > 1 else offset", "ahead = offset"),
        ("forbidden: earlier queries are let through", KERNELS, "_penalized",
         "token[:, None] != columns", "token[:, None] > columns + 1"),
        ("padding: keys are not masked", WEIGHTS, "AttentionRead.allowed", ", valid[:, None, None, cols]]", "]"),
        ("weights: sign of the log-sum-exp", WEIGHTS, "AttentionRead.weights",
         "else log_sim - lse", "else log_sim + lse"),
        ("weights: later keys of a chunk", WEIGHTS, "AttentionRead.weights",
         "max(cols.start, rows.start)", "max(cols.start, rows.stop)"),
        ("missing mass: sign", WEIGHTS, "AttentionRead.missing_mass", "- self.lse).exp()", "+ self.lse).exp()"),
        ("entropy: sign", WEIGHTS, "column_sums", "= -log_weights", "= log_weights"),
        ("window sums: chunks overwrite each other", WEIGHTS, "column_sums",
         "windows[..., band].add_(", "windows[..., band].copy_("),
        ("window sums: the band is a column short", WEIGHTS, "column_sums", "- window + 1)", "- window + 2)"),
        ("window sums: a window is one longer", WEIGHTS, "column_sums",
         "band, window - 1", "band, window"),
        ("plain window sums: a window is one shorter", WEIGHTS, "plain_window_sums",
         "reach + block), reach, 0", "reach + block), reach - 1, 0"),
        ("sinks: their gradient", KERNELS, "_WithSinks.backward", "total = total - of_lse", "pass"),
        ("sinks: the gradient of lse", KERNELS, "_WithSinks.backward", "-of_lse[..., None]", "of_lse[..., None]"),
    ),
    *_mutations(
        OPERATION_TESTS,
        ("operation: factor divides", OPERATIONS, "Operation.weights",
         "weights * self.factor", "weights / self.factor"),
        ("operation: a negative divisor", OPERATIONS, "Operation.weights", "total.abs().clamp", "total.clamp"),
        ("operation: the root of a power", OPERATIONS, "Operation.weights", ", seen) / self.power", ", seen)"),
    ),
    *_mutations(
        RETROFIT_TESTS,
        ("displacement: by row of a gate", "sinkscope.retrofits.retrofit", "Part.displacement",
         ".movedim(self.head_axis, 0)", ""),
        ("denominator: ALiBi's own bias", TAPS, "Denominator.added_to", "logits + own_bias", "logits - own_bias"),
        ("denominator: the model's own term is lost", TAPS, "Denominator.added_to",
         "logits.logaddexp(call.sink_logits.to(logits.dtype)[:, None])", "logits"),
        ("sink logits: of the first rows", KERNELS, "sink_rows",
         "sinks[:, :, rows]", "sinks[:, :, : rows.stop - rows.start]"),
        ("sink logits: not in the log-sum-exp", KERNELS, "row_lse", "lse.logaddexp(sink_logits.to(lse.dtype))", "lse"),
    ),
    *_mutations(
        STREAMING_TESTS,
        ("streaming: place in the cache", STREAMING, "Cache.positions", "self.window - 1", "self.window"),
        ("streaming: a window is one longer", STREAMING, "Cache.visible", "key < self.window", "key <= self.window"),
    ),
    *_mutations(
        TRACER_TESTS,
        ("gate: what it is divided by", TRACER, "share_of_gate", "/ before.square()", "/ after.square()"),
        ("gate: tokens in reverse", TRACER, "Reader._see_gate", '"output")).detach()', '"output")).detach().flip(1)'),
        ("positions: their offset", TRACER, "model_inputs", "\"position_ids\") + first_position",
         "\"position_ids\") + first_position + 1"),
        ("stacks: a site is written over the one before", TRACER, "_Stacks.add", "(index + 1) % room", "max(index, 0)"),
        ("stacks: without the last site", TRACER, "_Stacks._see", "sites[-1][2] + 1]", "sites[-1][2]]"),
        ("registers: counted as text", TRACER, "Reader.requests",
         "batch = batch.with_registers(self.registers)", "pass"),
        ("loss: sign of its gradient", LOSSES, "loss_and_gradient", "-torch.ones_like(", "torch.ones_like("),
        ("loss: gradient of the last token", LOSSES, "loss_and_gradient", ".masked_fill_(ignored[part], 0.0)", ""),
    ),
    *_mutations(
        OBSERVABLE_TESTS,
        ("attention: queries of a window", f"{OBSERVABLES}.attention", "Attention.finish",
         '"queries", size, window,', '"queries", size, None,'),
        ("attention: padding counts as queries", f"{OBSERVABLES}.reductions", "mean_over",
         "filled(x, present).sum(-1) / count.view(-1, *[1] * (x.dim() - 2))", "filled(x, present).mean(-1)"),
        ("attention: the token of a sink", f"{OBSERVABLES}.attention", "Attention._list_sinks",
         "position + batch.start[sequence]]", "position]"),
        ("attention: registers' mass", f"{OBSERVABLES}.attention", "outside_mass",
         "mass + torch.cat", "mass - torch.cat"),
        ("activation: the value norm's axes", f"{OBSERVABLES}.activation", "value_norms",
         "dim=(1, 3))", "dim=3).mean(1)"),
        ("activation: the largest negative entry", "sinkscope.measuring.one_pass", "token_peaks", "-x.amin", "x.amin"),
        ("geometry: keys that a query sees", f"{OBSERVABLES}.geometry", "keys_seen_by",
         "torch.arange(1, length + 1,", "torch.arange(0, length,"),
        ("geometry: other keys under a mask", f"{OBSERVABLES}.geometry", "masked_pair_means",
         "rows, None] - 1", "rows, None]"),
        ("geometry: the diagonal of a chunk", f"{OBSERVABLES}.geometry", "causal_pair_sums",
         ".tril_()", ".tril_(-1)"),
        ("massive: median with the token itself", f"{OBSERVABLES}.massive", "medians_elsewhere",
         "(lengths - 1)[", "lengths["),
        ("massive: one more entry", f"{OBSERVABLES}.massive", "Massive._list_entries", "(rank < TOP)", "(rank <= TOP)"),
    ),
    *_mutations(
        BIAS_TESTS,
        ("query bias: heads of a group", f"{OBSERVABLES}.query_bias", "bias_directions",
         "view(len(weight), -1, bias.shape[-1])", "view(-1, len(weight), bias.shape[-1]).transpose(0, 1)"),
    ),
    *_mutations(
        GRADIENT_TESTS,
        ("gradient: compress", f"{OBSERVABLES}.gradient", "Gradient._on_stream",
         "upcast(x) - z", "upcast(x) + z"),
        ("gradient: upper bound", f"{OBSERVABLES}.gradient", "_bounds",
         "(mass_squared - second)", "(mass_squared + second)"),
        ("gradient: groups of heads", f"{OBSERVABLES}.gradient", "TheoremOne.add_value_gradient",
         "unflatten(1, (gradient.shape[1], -1)).sum(2)", "unflatten(1, (-1, gradient.shape[1])).sum(1)"),
        ("gradient: a scaled branch", f"{OBSERVABLES}.gradient", "Gradient._on_stream",
         "upcast(gradient) / scale", "upcast(gradient) * scale"),
        ("gradient: the gain of both signs", f"{OBSERVABLES}.gradient", "norm_gains", "largest / 2", "largest"),
        ("gradient: every norm is centered", f"{OBSERVABLES}.gradient", "norm_gains", "constant == 0", "True"),
        ("gradient: gains of other norms", f"{OBSERVABLES}.gradient", "norm_gains",
         "on_cpu(differences)", "on_cpu(differences[::-1])"),
        ("gradient: LayerNorm's mean", f"{OBSERVABLES}.gradient", "NormGain.bound",
         " - entries.mean(-1, keepdim=True)", ""),
        ("gradient: the sum of squares", f"{OBSERVABLES}.gradient", "NormGain.bound", " / x.shape[-1]", ""),
        ("gradient: a norm for the change", f"{OBSERVABLES}.gradient", "Gradient._on_stream",
         "token_norms(x) / token_norms(z)", "token_norms(z) / token_norms(x)"),
    ),
    *_mutations(
        BRANCH_TESTS,
        ("site: only its last term", TRACER, "Reader.requests", "added + term if index else term", "term"),
        ("site: a branch is not scaled", TRACER, "Reader.requests", "else scale * term", "else term"),
    ),
    *_mutations(
        ESTIMATE_TESTS,
        ("bootstrap: half as many units", ESTIMATES, "resamplings", "multinomial(size,", "multinomial(size // 2 + 1,"),
        ("bootstrap: its level", ESTIMATES, "bootstrap", "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]", "[1 - LEVEL, LEVEL]"),
        ("jackknife: its factor", ESTIMATES, "jackknife", "(groups - 1) / groups", "1 / groups"),
        ("difference: the other end", ESTIMATES, "Estimate.__sub__",
         "other.high - other.value", "other.value - other.low"),
        ("runs: degrees of freedom", ESTIMATES, "mean_of_runs", "ddof=1", "ddof=0"),
        ("smallest of several: simultaneous ends", ESTIMATES, "least_of",
         "high=min(simultaneous)", "high=max(simultaneous)"),
        ("bootstrap: most draws are undefined", ESTIMATES, "bootstrap", "< LEVEL * len(drawn)",
         "< (1 - LEVEL) * len(drawn)"),
        ("range: without simultaneous ends", ESTIMATES, "range_of", "-each.high) for each in simultaneous",
         "-each.high) for each in differences"),
        ("smallest of several: its own lower end", ESTIMATES, "least_of",
         "low=min(each.low for each in estimates), ", ""),
        ("interval of a change: upside down", EFFECT_INTERVALS, "_interval_of_change",
         "after / before", "before / after"),
    ),
    *_mutations(
        SEQUENCE_TESTS,
        ("losses: a mean over sequences", "sinkscope.results.sequences", "Sequences.losses",
         "(weights @ np.nan_to_num(loss * predicted)) / (weights @ predicted)",
         "(weights @ np.nan_to_num(loss)) / weights.sum(1)"),
    ),
    *_mutations(
        INTERVENTION_TESTS,
        ("NU: a query bias suffices", "sinkscope.interventions.intervention", "expectation",
         "if applies and target.has_query_bias", "if applies or target.has_query_bias"),
        ("super weight: the most positive entry", "sinkscope.interventions.super_weight", "ZeroSuperWeight.measured",
         "weight.abs().argmax()", "weight.argmax()"),
        ("controls: parts without one are dropped", "sinkscope.interventions.intervention", "random_controls",
         "zip(stack, controls, strict=True)", "zip(stack, controls, strict=True) if control"),
        ("positions: the last is -0", f"{INTERVENTIONS}.intervention", "Intervention.from_the_start",
         "value + max(lengths) if", "value + max(lengths) - 1 if"),
        ("positions: the end of the longest sequence", f"{INTERVENTIONS}.intervention", "Intervention.from_the_start",
         "len(set(lengths)) != 1", "not lengths"),
        ("positions: registers are no tokens", "sinkscope.commands.intervene.experiment", "Experiment.resolved",
         "len(ids) + registers_before(model)", "len(ids)"),
        ("massive: added to what is there", f"{INTERVENTIONS}.massive", "MassiveEdits.applied",
         "x[:, coordinates] = values", "x[:, coordinates] += values"),
        ("massive: the smallest value elsewhere", f"{INTERVENTIONS}.massive", "MassiveEdits.measured",
         "x.abs().min()", "x.min()"),
        ("massive: negative ones elsewhere", f"{INTERVENTIONS}.massive", "replace_large",
         "entries.abs() >= least", "entries >= least"),
        ("epe: exchanged the wrong way", f"{INTERVENTIONS}.nu", "PositionVectors.applied",
         "epe[source] - epe[position]", "epe[position] - epe[source]"),
        ("super weight: a control may be the weight itself", f"{INTERVENTIONS}.super_weight", "ZeroSuperWeight.control",
         "other >= treated", "other > treated"),
        ("mask-sink: the sink's own weight", f"{INTERVENTIONS}.sink", "HiddenKeys.applied",
         "(query != key)", "(query >= key)"),
        ("isolate: a shifted cache", f"{INTERVENTIONS}.sink", "HiddenKeys.applied",
         "query, key = (row + shift -", "query, key = (row -"),
        ("isolate: what is hidden is seen", f"{INTERVENTIONS}.sink", "Isolate.hides",
         "else among(key, self.hidden)", "else ~among(key, self.hidden)"),
        ("isolate: a window with one token more", f"{INTERVENTIONS}.sink", "Isolate.hides",
         "query - key < self.last", "query - key <= self.last"),
        ("heads: padding is in the mean of their outputs", f"{INTERVENTIONS}.heads", "ScaleHeadOutputs.applied",
         " & (column >= columns[:, None] - position)", ""),
        ("heads: outputs of all heads are scaled", f"{INTERVENTIONS}.heads", "ScaleHeadOutputs.applied",
         "chosen(self.heads, target.query_heads)", "chosen(None, target.query_heads)"),
        ("heads: the mean is added, and not kept", f"{INTERVENTIONS}.heads", "ScaleHeadOutputs.applied",
         "center + self.factor", "self.factor"),
        ("isolate: its control sees position 0", f"{INTERVENTIONS}.sink", "Isolate.control", "draw, {0},", "draw, (),"),
        ("isolate: sums of plain rows", WEIGHTS, "AttentionRead.is_plain_except_forbidden",
         "all(forbidden.columns for", "all(forbidden.pairs for"),
        ("mask-sink: the key's own weight in sums", WEIGHTS, "_correct_forbidden",
         "torch.where(hidden, weights,", "torch.where(hidden, 0 * weights,"),
        ("massive: in more than half of the sequences", f"{INTERVENTIONS}.massive", "sink_massive",
         "counts >= sequences / 2", "counts > sequences / 2"),
        ("heads: a share is rounded down", f"{INTERVENTIONS}.heads", "dormant", "round(share", "int(share"),
        ("values: of heads with a sink anywhere", f"{INTERVENTIONS}.sink", "ChangedValues.resolved",
         'table["position"].isin(self.positions) & (', '('),
        ("super weight: the last layer counts for nothing", f"{INTERVENTIONS}.super_weight", "usual_pairs",
         '(table["layer"].max() + 1)', 'table["layer"].max()'),
        ("super expert: a large one that is none", f"{INTERVENTIONS}.super_weight", "ZeroSuperExpert.measured",
         'table[table["is_super"]] if', 'table if'),
        ("query bias: perturbed alike in all layers", f"{INTERVENTIONS}.nu", "PerturbQueryBias.edited",
         "self.seed + layer", "self.seed"),
    ),
    *_mutations(
        SMOOTHING_TESTS,
        ("smoothing: α of weights", SMOOTHING, "smoothing_factors",
         "weights.clamp_min(LEAST) ** (1 - alpha)", "weights.clamp_min(LEAST) ** alpha"),
        ("smoothing: one reader's weights", SMOOTHING, "smoothing_factors",
         "for each in readers]).amax(0)", "for each in readers])[0]"),
        ("smoothing: AWQ's last exponent", SMOOTHING, "awq_factors", "if total < least", "if True"),
        ("smoothing: AWQ without exponent 0", SMOOTHING, "awq_factors",
         "(step / AWQ_STEPS)", "((step + 1) / AWQ_STEPS)"),
        ("norms: Gemma's gain", NORMS, "scaled_inputs", "(1.0 - neutral)", "0.0"),
        ("norms: a bias is not divided", NORMS, "scaled_inputs",
         "norm.bias.double() / factor", "norm.bias.double()"),
        ("norms: the absolute change of logits", NORMS, "reparametrized",
         " / before.abs().max()", ""),
        ("norms: another function is kept", NORMS, "reparametrized",
         "not error < MOST_CHANGED", "False"),
    ),
    *_mutations(
        ("tests/options/test_measuring.py",),
        ("paths: the home folder", "sinkscope.options.files", "_looked_up", "return full", "return path"),
        ("specs: hyphens", "sinkscope.options.spec", "assignments", '.replace("-", "_")', ""),
        ("objects: a number of sequences that is named", "sinkscope.options.measuring", "RunConfig._read_all",
         "if name not in self.model_fields_set:", "if True:"),
        ("objects: a length that is named", "sinkscope.options.measuring", "RunConfig.reads_all",
         "Given) and self", "Given) or self"),
        ("folder: without the revision", "sinkscope.options.measuring", "ModelOptions.folder_name",
         "else name, self.revision)", "else name)"),
        ("folder: the repository of a .gguf file", "sinkscope.options.measuring", "ModelOptions.folder_name",
         "self.gguf_file or self.model", "self.model or self.gguf_file"),
        ("folder: names that become the same", "sinkscope.options.option", "distinct_folder_name",
         "return name if name == joined else", "return name if True else"),
    ),
    *_mutations(
        ("tests/output/test_run.py",),
        ("draw: no figures replace those of before", "sinkscope.output.result", "draw",
         "if figures is None or drawings:", "if True:"),
        ("draw: a page that is not wanted stays", "sinkscope.output.result", "draw", "elif is_ours:", "elif False:"),
        ("draw: a page of another process is replaced", "sinkscope.output.result", "draw",
         "if page and path.exists() and not is_ours:", "if False:"),
        ("draw: a page of another process is removed", "sinkscope.output.result", "draw",
         "elif is_ours:", "elif path.exists():"),
        ("files: all figures, of a recipe", "sinkscope.output.run", "_file_tree",
         'recipe["content"].get("figures", []) if recipe else figures.applicable(run)', "figures.applicable(run)"),
        ("files: all figures, though some are named", "sinkscope.output.run", "_file_tree",
         "if drawn is None:", "if True:"),
        ("files: without the last row", "sinkscope.output.run", "_file_tree",
         "range(0, len(names), 4)", "range(0, len(names) - 3, 4)"),
        ("three lines: the longest of several lengths", "sinkscope.output.run", "Run.__repr__",
         "span((read['shortest'], read['longest']))", "read['longest']"),
        ("notebook: all findings", "sinkscope.output.run", "Run._repr_html_", " if finding.is_headline]", "]"),
    ),
    *_mutations(
        ("tests/html_page/test_html.py",),
        ("cut: a table of exactly as many rows", "sinkscope.html_page.compact", "cut",
         "len(table) > most and", "len(table) >= most and"),
        ("cut: a position of too many rows", "sinkscope.html_page.compact", "cut", "or len(rows) <= most", "or True"),
        ("cut: all of one sequence", "sinkscope.html_page.compact", "cut", "nunique() > 1", "nunique() > 0"),
        ("maps: padding is shown", "sinkscope.html_page.compact", "compact_maps",
         "None if mask is None else int(mask[0].sum())", "None"),
        ("maps: causal in one layer", "sinkscope.html_page.compact", "compact_maps",
         "not any(np.triu", "not all(np.triu"),
        ("tables of parts: rows by sequence", "sinkscope.html_page.contents", "Contents.all_tables",
         'or ("query" not in columns and not set(columns).isdisjoint(BY_SEQUENCE))', ""),
        ("tables of parts: without maps", "sinkscope.html_page.contents", "Contents.all_tables",
         '"query" not in columns and ', ""),
        ("tables of parts: in place of the folder's", "sinkscope.html_page.contents", "Contents.all_tables",
         "if name in tables or", "if"),
        ("spread: infinite values", "sinkscope.html_page.contents", "spreads",
         'rows[np.isfinite(rows["value"].astype(float))]', "rows"),
        ("links: pages that do not exist", "sinkscope.html_page.html", "page_data",
         "            if page.is_file()\n", ""),
        ("absent: without runs", "sinkscope.html_page.contents", "Contents.of_folder",
         '            *(f"run {label}" for label in places if label not in parts),\n', ""),
        ("absent: without activations", "sinkscope.html_page.contents", "Contents.of_folder",
         '            *([FILE] if manifest.get("activations") and not activations else []),\n', ""),
        ("findings: another claim", "sinkscope.html_page.html", "_as_data",
         "RUN_CLAIMS.get(finding.claim)", "RUN_CLAIMS.get(finding.name)"),
    ),
    *_mutations(
        ("tests/options/test_signatures.py",),
        ("errors: flags in Python", "sinkscope.options.signatures", "spelled_for_python",
         "if not is_typed.get()", "if is_typed.get()"),
        ("errors: a flag has a value", "sinkscope.options.signatures", "as_keywords",
         "fields[name].annotation is bool", "False"),
        ("errors: command lines in Python's spelling", "sinkscope.options.signatures", "as_keywords",
         "if name not in fields", "if not name"),
    ),
    *_mutations(
        ROUNDING_TESTS,
        ("rounding: int8 to 127 steps", ROUNDING, "scales", "- 1) / 2)", "- 2) / 2)"),
        ("rounding: MX as the OCP specification", ROUNDING, "scales",
         " + (mantissa >= 0.875)", ""),
        ("rounding: NVFP4 without the tensor's scale", ROUNDING, "scales",
         "E4M3 * E2M1 / whole", "E4M3 / whole"),
        ("rounding: every group has the range of the first row", ROUNDING, "scales",
         "largest)[..., None]", "largest).flatten()[:1]"),
        ("rounding: ties of e2m1 away from zero", ROUNDING, "round_to_e2m1",
         "(magnitude / step).round_()", "(magnitude / step + 0.5).floor_()"),
        ("preset: the smallest group", FORMATS, "Preset.fitted",
         "[size, size // 2, size // 4]", "[size // 4, size // 2, size]"),
    ),
    *_mutations(
        METRIC_TESTS,
        ("rate: missing without attention", "sinkscope.results.metrics", "has_no_rate",
         ' and not isnan(values.get("uniform_mass", nan))', ""),
    ),
    *_mutations(
        FORMAT_TESTS,
        ("latex: one number makes a column of numbers", "sinkscope.verdict.table_formats", "_as_latex",
         "columns and all(", "columns and any("),
    ),
    *_mutations(
        VERDICT_TESTS,
        ("uniform gradients: one more query", "sinkscope.measuring.summary", "uniform_gradient_ratio",
         "[:, None] > queries)", "[:, None] >= queries)"),
        ("a finding: the outcome of its claim", "sinkscope.verdict.report", "finding",
         '(judgment_of(fields["claim"], value) if "claim" in fields else {}) | fields | interval(value)',
         'fields | (judgment_of(fields["claim"], value) if "claim" in fields else {}) | interval(value)'),
        ("pictures: the mean of CLS and registers", "sinkscope.verdict.probes", "_outlier_patches",
         '["mass"].sum().mean()', '["mass"].mean().mean()'),
        ("query bias: layers of the last resample", "sinkscope.verdict.analysis", "_query_bias",
         "delta_gaps(evidence)[0] > limits.OUTLIER", "delta_gaps(evidence)[-1] > limits.OUTLIER"),
        ("outside: the layer with the smallest rate", ANALYSIS, "_outside", "rates.max() < NO_SINK",
         "rates.min() < NO_SINK"),
        ("own gates: the layer with the smallest rate", ANALYSIS, "_sink", "rates.max() >=", "rates.min() >="),
        ("query bias: layers that it does not set apart", ANALYSIS, "_query_bias", "[0] > limits.OUTLIER",
         "[0] < limits.OUTLIER"),
        ("nothing massive: the smallest ratio", ANALYSIS, "_nothing_massive", 'table["ratio"].idxmax()',
         'table["ratio"].idxmin()'),
        ("spikes: the least of all rotations", PROBES, "_spikes", '["rotated_share"].max()',
         '["rotated_share"].min()'),
        ("spikes: the layer with the fewest", PROBES, "_spikes", '["largest_share"].idxmax()',
         '["largest_share"].idxmin()'),
        ("massive coordinate: entries for sequences", ANALYSIS, "_massive_activations",
         '["sequence"].nunique()', '["sequence"].count()'),
        ("later sinks: a share of nothing", ANALYSIS, "_later_sinks", "limits.MOSTLY * rates.max()", "limits.MOSTLY"),
        ("float16: without headroom", ANALYSIS, "_number_formats", " / limits.HEADROOM", ""),
        ("window: reached at its length", ANALYSIS, "_windows", "longest <= window", "longest < window"),
        ("secondary sinks: of every kind", PROBES, "_secondary_sink_findings",
         'table[table["kind"] == SECONDARY]', "table"),
        ("over-mixing: an arm is its own control", PROBES, "_over_mixing", '"{label} control "', '"{label}"'),
        ("sink output: one query decides", PROBES, "_sink_output", "at_half >= GIVING_HALF", "at_half > 0"),
        ("sink output: both rules at once", PROBES, "_sink_output", "has_sink |=", "has_sink &="),
        ("sink output: a broadcast of any rank", PROBES, "_sink_output", " & (rank <= ONE_VECTOR)", ""),
        ("sink output: the null of all heads", PROBES, "_sink_output", "uniform[0, has_sink[0]]", "uniform[0]"),
        ("sink output: heads without a sink count", PROBES, "_sink_output", "(has_sink & kind)", "kind"),
        ("sink output: the same heads in every draw", PROBES, "_sink_output", "(has_sink & kind)",
         "(has_sink[0] & kind)"),
        ("decoding: a change between independent means", PROBES, "_decoding", '"change": bootstrap(last - first)',
         '"change": bootstrap(last) - bootstrap(first)'),
        ("decoding: changes of sequences that have ended", PROBES, "_decoding", "np.where(goes_on, x, np.nan)",
         "np.nan_to_num(x)"),
        ("decoding: each sequence counts alike", PROBES, "_decoding", "(run.weights @ sums) / (run.weights @ tokens)",
         "(run.weights @ (sums / tokens)) / run.weights.sum(1)"),
        ("dormant heads: the sign of a score", PROBES, "_heads", "rank_correlation(-norm", "rank_correlation(norm"),
        ("outlier patches: after every layer", PROBES, "_outlier_patches",
         'table[table["layer"] == table["layer"].max()]', "table"),
        ("super weight: the largest positive activation", PROBES, "_super_weight",
         'massive["value"].abs().idxmax()', 'massive["value"].idxmax()'),
        ("visual sinks: the upper end decides", PROBES, "_visual_sinks",
         "share.low > share.null", "share.high > share.null"),
        ("pictures: a share of all attention goes to sinks", PROBES, "_visual_sinks",
         'ON_SINKS * heads["visual_mass"]', "ON_SINKS"),
    ),
    *_mutations(
        FIGURE_TESTS,
        ("figure: sinks of the layer before", f"{FIGURES}.states", "draw_entropy_by_layer",
         "lambda layer: layer - 1).drop(-1", "lambda layer: layer + 1).drop(-1"),
        ("figure: the first sink joins itself", f"{FIGURES}.states", "draw_sink_tokens",
         'table[table["kind"] != FIRST_SINK]', "table"),
        ("figure: spikes among residual sinks", f"{FIGURES}.states", "draw_residual_sinks",
         'coordinates.query(f"kind == {RESIDUAL_SINK!r}")', "coordinates"),
        ("figure: a super weight of a late layer", f"{FIGURES}.states", "draw_super_weights",
         'usual[usual["is_early"]]["written"]', 'usual["written"]'),
        ("figure: numbers of heads", f"{FIGURES}.states", "draw_head_scores",
         '(table["head"].max() + 1) + table["head"]', 'table["head"].max() + table["head"]'),
        ("figure: alignment with position 0", f"{FIGURES}.query_bias", "draw_query_bias_alignment",
         'by_head[by_head["position"] > 0].groupby', "by_head.groupby"),
        ("figure: half of the spread of γ", f"{FIGURES}.query_bias", "draw_gamma",
         "2 * by_layer.std(ddof=0)", "by_layer.std(ddof=0)"),
        ("figure: the smallest massive coordinates", f"{FIGURES}.query_bias", "draw_gamma",
         "ascending=False", "ascending=True"),
        ("figure: the layer with the fewest visual sinks", f"{FIGURES}.pictures", "draw_visual_sinks",
         "sinks.idxmax() if", "sinks.idxmin() if"),
        ("figure: patches below the threshold", f"{FIGURES}.pictures", "_maps",
         "patches[patches[mark[0]] > mark[1]]", "patches[patches[mark[0]] < mark[1]]"),
        ("figure: the first tile", f"{FIGURES}.pictures", "_maps",
         'patches["tile"] == patches["tile"].max()', 'patches["tile"] == patches["tile"].min()'),
        ("figure: patches of the first layer", f"{FIGURES}.pictures", "draw_outlier_patches",
         'table["layer"].max()', 'table["layer"].min()'),
    ),
    *_mutations(
        PICTURE_TESTS,
        ("pictures: coordinates with the smallest ratio", PICTURES, "phi_coordinates",
         "ascending=False", "ascending=True"),
        ("pictures: random coordinates may be massive", PICTURES, "VisualSinks.__init__",
         "if coordinate not in set(coordinates)", ""),
        ("pictures: the null is the sinks themselves", PICTURES, "VisualSinks.see_attention",
         'on_patches @ self.of_layer["random_share"].to(mass.dtype)', "on_patches @ sinks"),
        ("pictures: as the folder lists them", "sinkscope.text.pictures", "read_pictures",
         "sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURE_ENDINGS)",
         "[file for file in folder.iterdir() if file.suffix.lower() in PICTURE_ENDINGS]"),
        ("pictures: special tokens in one column", PICTURES, "encoder_patches",
         "np.arange(tokens), index % wide", "-1, index % wide"),
    ),
    *_mutations(
        SUMMARY_TESTS,
        ("summary: the mean gain of later positions", SUMMARY, "gradient_summary",
         "_later(by_position, longest).median(axis=1)", "_later(by_position, longest).mean(axis=1)"),
        ("summary: the mean gain of layers", SUMMARY, "gradient_summary",
         "float(by_layer[metric].median())", "float(by_layer[metric].mean())"),
        ("summary: layers' ratios of value and key", SUMMARY, "gradient_summary",
         "float(value.mean() / key.mean())", "float((value / key).mean())"),
        ("summary: as many queries as are needed", SUMMARY, "_rate_of_pairs",
         "queries >= FEWEST_QUERIES", "queries > FEWEST_QUERIES"),
    ),
    *_mutations(
        METRIC_ESTIMATE_TESTS,
        ("LaTeX: the null of the first threshold", "sinkscope.verdict.table_formats", "EstimateTable.to_latex",
         '.agg(lambda column: ", ".join(dict.fromkeys(column)))', '.agg("first")'),
        ("estimates: a difference of losses by the bootstrap", OF_METRICS, "difference_of",
         "(jackknife if metric in OF_LOSS else bootstrap)", "bootstrap"),
        ("metrics: as many draws as texts", ESTIMATES, "resamplings", "* narrower**2", ""),
        ("metrics: equal texts have no interval", OF_METRICS, "estimate_of", 'unit == "share"', 'unit == "none"'),
        ("metrics: unseen values of any share", ESTIMATES, "with_unseen_values", "** (1 / units)", "** units"),
        ("metrics: the threshold of the run", OF_METRICS, "Source.values", "sequences.epsilon if epsilon is None else",
         "sequences.epsilon if epsilon is not None else"),
        ("metrics: a rate where uniform attention has one", OF_METRICS, "Source.values",
         "& ~lacks_rate(uniform, epsilon)", ""),
        ("metrics: layers of unfiltered rows", OF_METRICS, "Source.values", "self.by, **self.where", "self.by"),
        ("metrics: the mean of all layers", OF_METRICS, "replicates", 'METRICS[metric].whole, "mean"', '"", "mean"'),
        ("metrics: the null of a rate", OF_METRICS, "estimate_table", "0.0 if source.rate else nan", "nan"),
        ("metrics: a null at the run's own threshold", OF_METRICS, "estimate_table",
         "replicates(null, metric, level, epsilon)", "replicates(null, metric, level)"),
        ("metrics: sequences of one head", OF_METRICS, "estimate_table", ".any(axis=", ".all(axis="),
        ("metrics: pairs of other texts", OF_METRICS, "reads_the_same", "len(hashes) == 1", "len(hashes) >= 1"),
        ("metrics: no pairs", OF_METRICS, "reads_the_same", "len(hashes) == 1", "len(hashes) == 3"),
        ("metrics: pairs of texts that are counted in two ways", OF_METRICS, "reads_the_same",
         " and np.array_equal(first.run.text_numbers, second.run.text_numbers)", ""),
        ("metrics: first − second", OF_METRICS, "difference_of", "differences(before, after)",
         "differences(after, before)"),
        ("metrics: counts of sequences with rows", OF_METRICS, "Source.values",
         "range(sequences.weights.shape[1]), fill_value=0", "range(sequences.weights.shape[1])"),
        ("metrics: an endless interval is printed", "sinkscope.verdict.table_formats", "EstimateTable.to_latex",
         """ if isfinite(row["low"]) else """, " or "),
        ("metrics: texts without a value", OF_METRICS, "estimate_table", "texts_of(sequences, has_value)[index]",
         "sequences.texts"),
        ("metrics: both runs at the threshold of the first", OF_METRICS, "difference", "replicates(each, metric)",
         "replicates(each, metric, epsilon=first.epsilon)"),
        ("heads: halves of the first run", OF_HEADS, "head_differences", "tested * (1 + is_paired), values,",
         "tested * (1 + is_paired), [values[0]] * 2,"),
        ("heads: texts without a value are counted", OF_HEADS, "head_differences", '_texts": len(x)',
         '_texts": len(of_run)'),
        ("heads: p without correction", OF_HEADS, "head_differences",
         "= scipy.stats.false_discovery_control(p[is_tested])", "= p[is_tested]"),
        ("heads: copies are texts", OF_HEADS, "head_differences", "np.unique(numbers)[:, None]",
         "np.arange(len(numbers))[:, None]"),
        ("heads: overlapping halves", OF_HEADS, "differing_halves", "split[half:]", "split[half // 2:] + 0.05"),
        ("heads: ranks without signs", ESTIMATES, "p_values", "np.sign(first) *", "1.0 *"),
        ("heads: one-sided", ESTIMATES, "p_values", "2 * ndtr", "ndtr"),
        ("latex: ends swapped", "sinkscope.verdict.table_formats", "EstimateTable.to_latex",
         """[{text(row['low'])}, {text(row['high'])}]""", """[{text(row['high'])}, {text(row['low'])}]"""),
        ("run: the value of another position", "sinkscope.results.run", "RunData._of_head",
         ' & (table["position"] == 0)', ' & (table["position"] == 1)'),
    ),
    *_mutations(
        OF_RUN_TESTS,
        ("estimate: the mean over sink heads", OF_RUN, "in_sink_heads",
         "np.median((first / later)[:, chosen], axis=1)", "np.mean((first / later)[:, chosen], axis=1)"),
        ("estimate: massive anywhere", OF_RUN, "massive_layers", ' & (table["position"] == 0)', ""),
        ("estimate: massive in more than half", OF_RUN, "massive_layers", "share >= USUAL", "share > USUAL"),
        ("estimate: massive in all layers", OF_RUN, "massive_count", ".max(1))", ".sum(1))"),
        ("estimate: half of an odd number of layers", OF_RUN, "second_half",
         "by_layer.shape[-1] // 2", "(by_layer.shape[-1] + 1) // 2"),
        ("estimate: alignment with its sign", OF_RUN, "_later_alignment",
         "np.abs(later_positions", "(later_positions"),
        ("estimate: the slope twice", OF_RUN, "_compression_slope",
         "compression_fit(sequences, first=1)[0]", "compression_fit(sequences)[0]"),
        ("estimate: the mean share within the bound", OF_RUN, "share_within_bound",
         'exact(table["bound_share"].min())', 'exact(table["bound_share"].mean())'),
        ("estimate: values of layers without gates", OF_RUN, "before_valves",
         ' & gradient["layer"].isin(gradient["layer"][is_raw].unique())', ""),
        ("estimate: a super weight of a late layer", OF_RUN, "super_weight",
         'usual = usual[usual["is_early"]]', "pass"),
        ("estimate: copies of a picture", OF_RUN, "_ratio_of_sums", "pd.factorize(looks)[0]", "np.arange(len(sums))"),
        ("estimate: outliers of all layers", OF_RUN, "outlier_share",
         'table[table["layer"] == table["layer"].max()]', "table"),
    ),
    *_mutations(
        ("tests/attention/test_position_kinds.py",),
        ("positions: rotary only with turned queries and keys", POSITIONS, "with_positions",
         "any(each.all()", "all(each.all()"),
        ("positions: keys alone", POSITIONS, "with_positions",
         'for name in ("query", "key")', 'for name in ("key", "key")'),
        ("positions: every tensor of the state's shape", POSITIONS, "_repeat_last_state",
         "torch.equal(value, state)", "True"),
    ),
    *_mutations(
        ("tests/models/test_calibrate.py",),
        ("wiring: the ends of other modules", "sinkscope.models.wiring", "record_ends",
         "on_cpu(x for *_, x in events)", "on_cpu(x for *_, x in events[::-1])"),
    ),
    *_mutations(
        ("tests/measuring/test_parity.py",),
        ("parity: the layer that differs least", "sinkscope.measuring.parity", "RoundOff.check_attention",
         "worst = max(", "worst = min("),
        ("parity: differences of other layers", "sinkscope.measuring.parity", "comparing",
         "on_cpu(x for _, x in differences)", "on_cpu(x for _, x in differences[::-1])"),
        ("parity: the bound without the mask", "sinkscope.measuring.parity", "attention_round_off",
         "logits + mask.masked_fill(mask <= MASKED, 0.0).abs().max()", "logits"),
        ("parity: the bound without sink logits", "sinkscope.measuring.parity", "attention_round_off",
         "logits + sinks.abs().max()", "logits"),
    ),
    *_mutations(
        STREAMING_TESTS,
        ("streaming: buckets a token late", "sinkscope.measuring.streaming", "measure_streaming",
         "sums[max(start, 1) - 1 : start + size - 1]", "sums[start : start + size]"),
        ("streaming: a cache that never slides", "sinkscope.measuring.streaming", "measure_streaming",
         "max(windows) > length - 2:", "max(windows) > length - 1:"),
    ),
    *_mutations(
        CALLBACK_TESTS,
        ("curves: the name of a relative folder", "sinkscope.commands.compare.curves", "curves",
         "[folder.resolve() for folder in folders]", "folders"),
        ("callback: without the last step", CALLBACK, "SinkCallback.on_step_end",
         "state.global_step >= state.max_steps", "state.global_step > state.max_steps"),
        ("callback: the mean of layers", CALLBACK, "SinkCallback._tables_of",
         "massive.max() / len", "massive.mean() / len"),
    ),
    *_mutations(
        TEXT_TESTS,
        ("text: windows of a passage", "sinkscope.text.sources", "windows",
         "round(PASSAGE / step)", "round(PASSAGE / request.num_seqs)"),
        ("text: a passage without its last paragraph", "sinkscope.text.sources", "_by_author",
         "paragraphs[first:end]", "paragraphs[first : end - 1]"),
        ("text: windows are documents", "sinkscope.text.inputs", "TokenInputs.documents", "self.windows_of or ", ""),
        ("text: a prompt that is not cut", "sinkscope.text.sources", "prompted",
         "len(ids) > request.seq_len", "len(ids) >= request.seq_len"),
        ("text: a word that is cut", "sinkscope.text.tokens", "first_tokens",
         "< count + spare and", "< count and"),
        ("text: an unknown word is a special token", "sinkscope.text.sources", "Request.token_zero",
         'self.special - {getattr(self.tokenizer, "unk_token_id", None)}', "self.special"),
        ("text: tokens of a prefix are predicted", "sinkscope.text.inputs", "TokenInputs.predicted",
         "len(ids) - self.first_predicted", "len(ids) - 1"),
        ("objects: a dataset of torch without its last row", "sinkscope.options.given", "_dataset_rows",
         "range(len(thing))", "range(len(thing) - 1)"),
        ("packed: lengths that include padding", "sinkscope.options.records", "_sequences",
         "before = first if sum(lengths) == len(seen) else 0", "before = first"),
        ("records: the first entry, though it is null", "sinkscope.options.records", "documents_of",
         "next((name for name in present if record[name] is not None), present[0])", "present[0]"),
    ),
    *_mutations(
        STATE_TESTS,
        ("residual sinks: from more than 90 %", f"{OBSERVABLES}.spikes", "ResidualSinks.tables",
         'coordinates["share"] >= RESIDUAL_SHARE', 'coordinates["share"] > RESIDUAL_SHARE'),
        ("residual sinks: the rarest first", f"{OBSERVABLES}.spikes", "ResidualSinks.tables",
         '["share", "ratio_max"], ascending=False', '["share", "ratio_max"], ascending=True'),
        ("residual sinks: means over sequences", f"{OBSERVABLES}.spikes", "ResidualSinks.tables",
         ".numpy() / tokens for", ".numpy() / sequences for"),
        ("residual sinks: the null is not rotated", f"{OBSERVABLES}.spikes", "ResidualSinks.see",
         "hidden @ self.rotation.to(hidden)", "hidden"),
        ("spike filter: never a BOS before given texts", "sinkscope.commands.analyze.command", "spike_filter",
         '{"bos": "never", "input": ids} | options', 'options | {"bos": "never", "input": ids}'),
        ("spike mask: a BOS before given texts", "sinkscope.commands.analyze.command", "spike_mask",
         '"bos": "never", ', ""),
        ("spike filter: one direction only", "sinkscope.measuring.spike_mask", "SpikeFilter.__call__",
         "cosine.abs()", "cosine"),
        ("spike filter: any norm", "sinkscope.measuring.spike_mask", "SpikeFilter.__call__",
         "dim=-1) >=", "dim=-1) <="),
        ("spike filter: all layers", "sinkscope.measuring.spike_mask", "calibrated_filter",
         "norms.where(is_alive, torch.inf)", "norms"),
        ("spike filter: the last layer of a life is left out", "sinkscope.measuring.spike_mask", "calibrated_filter",
         'layer <= first["last_layer"]', 'layer < first["last_layer"]'),
        ("spike filter: medians of a part of the texts", "sinkscope.measuring.spike_mask", "FirstSinks.see",
         "start : start + length", "start : start + 2"),
        ("spike mask: without registers", "sinkscope.measuring.spike_mask", "measured_mask",
         ".with_registers(registers_before(model))", ""),
        ("spike mask: residual coordinates of any kind", "sinkscope.measuring.spike_mask", "measured_mask",
         'residual[residual["kind"] == RESIDUAL_SINK]', "residual"),
        ("spike filter: the mean over texts with a sink", "sinkscope.measuring.spike_mask", "calibrated_filter",
         "/ len(subject.inputs)", "/ len(first)"),
        ("spike filter: sinks of the first batch", "sinkscope.measuring.spike_mask", "FirstSinks.see",
         "batch.first + row", "row"),
        ("spike filter: another token's state", "sinkscope.measuring.spike_mask", "FirstSinks.see",
         "start + position", "start"),
    ),
    *_mutations(
        NEURON_TESTS,
        ("super experts: the first ¾ without a layer", f"{OBSERVABLES}.super_weight", "SuperWeight.tables",
         '(table["layer"].max() + 1)', 'table["layer"].max()'),
        ("super experts: either threshold", f"{OBSERVABLES}.super_weight", "SuperWeight.tables",
         "least = max(experts", "least = min(experts"),
        ("over-mixing: the farthest token before", f"{OBSERVABLES}.over_mixing", "substituted",
         "*reversed(text[1:position])", "*text[1:position]"),
    ),
    *_mutations(
        SINK_OUTPUT_TESTS,
        ("sink output: a projection with a hook", f"{OBSERVABLES}.sink_output", "SinkOutput.prepare",
         "check_plain(module)", "pass"),
        ("sink output: position 0 is one of the others", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         " & ~is_sink", ""),
        ("sink output: hidden keys count as uniform", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "read.allowed(rows, keys)", "None"),
        ("sink output: the share of the others", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "share_of(term, rest)", "share_of(rest, term)"),
        ("sink output: mean absolute deviation", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         ".square(), later).sqrt()", ".abs(), later)"),
        ("sink output: padding has a value", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "mean_over(norms, later)", "mean_over(norms, None)"),
        ("sink output: ranks count position 0", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "filled(x.mT, later).mT", "x"),
        ("sink output: the rank of the term alone", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "(term + rest, rest)", "(term + rest, term)"),
        ("sink output: the stable rank before the projection", f"{OBSERVABLES}.sink_output",
         "SinkOutput.see_attention", "outputs @ written.double()", "outputs"),
        ("sink output: a sequence without a query", f"{OBSERVABLES}.sink_output", "SinkOutput.see_attention",
         "batch.lengths > 1", "batch.lengths > 0"),
        ("sink output: heads mixed in the projection", f"{OBSERVABLES}.sink_output", "output_factor",
         "unflatten(0, (heads, width))", "unflatten(0, (width, heads)).transpose(0, 1)"),
        ("sink output: a transposed projection", f"{OBSERVABLES}.sink_output", "output_factor",
         "weight if isinstance(module, Conv1D) else weight.T", "weight"),
    ),
    *_mutations(
        ("tests/measuring/test_gate.py",),
        ("gate: padding counts as tokens", f"{OBSERVABLES}.geometry", "Gate.see_gate",
         "filled(moments.movedim(0, 1), batch.valid).sum((0, 3))", "moments.movedim(0, 1).sum((0, 3))"),
    ),
    *_mutations(
        FIGURE_TESTS,
        ("figure: a title's tokens", f"{FIGURES}.labels", "title",
         "tokens % sequences == 0", "tokens % sequences != 0"),
        ("figure: uniform attention of one sequence", f"{FIGURES}.decoding", "draw_decoding", '("uniform", "mean")',
         '("uniform", "first")'),
        ("figure: steps of any thought", f"{FIGURES}.decoding", "draw_decoding", '["thought"] > 0.5',
         '["thought"] > 0'),
    ),
    *_mutations(
        SPARED_TESTS,
        ("spared: positions that one sequence spares", SPARED, "Spared._mask", "tokens.all(0,", "tokens.any(0,"),
        ("spared: tokens and coordinates", SPARED, "Spared._mask", "tokens | coordinates", "tokens & coordinates"),
        ("spared: they widen the range", SPARED, "Spared.snap",
         "grid.snap(x.masked_fill(spared, 0.0))", "grid.snap(x)"),
        ("spared: weights", SPARED, "Spared._mask", " or site.part == WEIGHT", ""),
        ("spared: tokens of the first batch", SPARED, "Spared.read",
         "batch.first : batch.first + len", "0 : len"),
    ),
    *_mutations(
        ("tests/measuring/test_keeping.py",),
        ("attention: another model has the weights that the run kept", "sinkscope.output.run", "Run.attention",
         "text is None and model is None", "text is None"),
        ("attention: the first weights are all of them", "sinkscope.output.run", "Run.attention",
         "stored and length <= next(iter(stored.values())).shape[-1]", "stored"),
        ("attention: texts as long as those of the run", "sinkscope.measuring.keeping", "attention_of",
         '{"dataset": None, "seq_len": longest}', '{"dataset": None}'),
        ("attention: of an input that has changed", "sinkscope.measuring.keeping", "attention_of",
         "if model is None and inputs.sha256", "if False and inputs.sha256"),
    ),
    *_mutations(
        DECODING_TESTS,
        ("decoding: the row of the previous key", DECODING, "newest_weights", "amax(-1)", "amax(-1) - 1"),
        ("decoding: position 0 of the padded row", DECODING, "Decoding.see_attention",
         '- batch.on(device, "before")[:, None]', "- newest[:, None]"),
        ("decoding: keys before the window are the first of it", DECODING, "weights_at",
         ".masked_fill(columns < 0, 0.0)", ""),
        ("decoding: an ended sequence gives attention", DECODING, "Decoding.see_attention",
         "to_decoded * goes_on", "to_decoded"),
        ("decoding: a sequence that ended goes on", DECODING, "Decoding.begin", "(self._steps == self.steps) & ", ""),
        ("decoding: all steps are queries of a token", DECODING, "Decoding._sinks",
         "torch.arange(tokens.shape[1])", "torch.zeros(tokens.shape[1])"),
        ("decoding: the last position", DECODING, "Decoding.tables", "[sequence] + step", "[sequence] - step"),
        ("decoding: tokens of the first sequence", DECODING, "Decoding.tables",
         "tokens[sequence, step]", "tokens[0, step]"),
        ("decoding: a thought without an end", DECODING, "tokens_of_thought", "opened > closed", "opened > 0"),
        ("decoding: the first of several end tokens", DECODING, "ends_of", "np.atleast_1d(ends)",
         "np.atleast_1d(ends)[:1]"),
        ("decoding: thoughts that no template writes", DECODING, "thought_of", " if first in template", ""),
        ("decoding: one step less", WATCHING, "decode", "count + 1", "count"),
        ("decoding: a cache that was emptied goes on", WATCHING, "Watched._continue",
         "self._decoded[place] = _no_cache, decoding", "pass"),
        ("decoding: the thought of a prompt is over", DECODING, "Decoding._thoughts",
         "tokens_of_thought(tokens, self.thought)[:, self.prompt.token_ids.shape[1] :]",
         "tokens_of_thought(tokens[:, self.prompt.token_ids.shape[1] :], self.thought)"),
        ("decoding: registers are no positions", WATCHING, "_step", "mask.sum(1) - 1 + registers", "mask.sum(1) - 1"),
        ("decoding: penalties of the model", WATCHING, "decode", "_generating(model, how), ", ""),
        ("decoding: the mask counts the new token", WATCHING, "_step", "mask.sum(1) - 1", "mask.sum(1)"),
        ("decoding: caches are mixed up", WATCHING, "Watched._continued", "reference() is cache", "True"),
        ("decoding: the limit of positions", WATCHING, "check_decoding", "longest + count > limit", "count > limit"),
        ("decoding: the change from the last to the first", PROBES, "_decoding",
         '"change": bootstrap(last - first)', '"change": bootstrap(first - last)'),
        ("decoding: each token counts", PROBES, "_decoding",
         '.drop_duplicates(["layer", "head", "sequence"])', ""),
    ),
    *_mutations(
        IDENTITY_TESTS,
        ("identities: without the output", f"{OBSERVABLES}.gradient_identities", "gradients_through_logits",
         "(through_values - outside[:, :, rows, None])", "through_values"),
        ("identities: the softcap's derivative", f"{OBSERVABLES}.gradient_identities", "gradients_through_logits",
         "(1 - (read.logits(rows, cols) / cap).square())", "(read.logits(rows, cols) / cap).square()"),
        ("identities: one chunk of queries", f"{OBSERVABLES}.gradient_identities", "gradients_through_logits",
         "of_keys[:, :, cols] +=", "of_keys[:, :, cols] ="),
        ("identities: only the first head of a group", f"{OBSERVABLES}.gradient_identities",
         "GradientIdentities._compare", ".sum(2)", "[:, :, 0]"),
        ("identities: the gradient of padding", f"{OBSERVABLES}.gradient_identities",
         "GradientIdentities._compare", "batch.tokens_at(upcast(gradient).transpose(1, 2), self.settings.positions)",
         "upcast(gradient).transpose(1, 2)[:, : self.settings.positions]"),
        ("identities: the query that sees one key", f"{OBSERVABLES}.gradient_identities",
         "GradientIdentities.tables", 'if pathway == "query":', "if False:"),
        ("pullback: the gate's own path", "sinkscope.retrofits.gates", "ValueGate.pullback",
         "gate * (1 - gate / scale)", "gate * (1 - gate)"),
        ("pullback: V-scale along the value", "sinkscope.retrofits.gates", "ValueScale.pullback", "2 * c", "c"),
    ),
    *_mutations(
        EQUAL_TOKEN_TESTS,
        ("relative: distances the other way round", f"{OBSERVABLES}.equal_tokens", "bias_of_distance",
         "column - seen", "seen"),
        ("alibi: the slope's sign", f"{OBSERVABLES}.equal_tokens", "bias_of_distance", "-slope[:, None]",
         "slope[:, None]"),
        ("closed form: of the keys' places", f"{OBSERVABLES}.equal_tokens", "closed_form_difference",
         "(row[:, None] - column).abs()", "column.expand(len(row), -1)"),
    ),
    *_mutations(
        SUMMARY_TESTS,
        ("summary: the sum after the norm", SUMMARY, "layer_inf_norm", ".first()", ".last()"),
        ("summary: kurtosis of all sites of a post-norm model", SUMMARY, "kurtosis_with_norms",
         '["mlp_out", "layer_out"])]', '["mid", "mlp_out", "out_sum", "layer_out"])]'),
    ),
    *_mutations(
        MASKED_TESTS,
        ("mix: a projection outside is not reached", "sinkscope.retrofits.retrofit", "change_mix",
         "(change(getattr(attention, RETROFIT), output[0]), *output[1:])", "output"),
    ),
]  # fmt: skip


def mutations_of_commands() -> list[Mutation]:
    mutations = []
    for path in sorted((ROOT / "tests" / "commands").glob("*/mutations.py")):
        command = path.parent.name
        for name, module, *change in runpy.run_path(str(path))["MUTATIONS"]:
            module = module if module.startswith("sinkscope.") else f"sinkscope.commands.{command}.{module}"
            mutations.append(Mutation(f"{command}: {name}", module, *change, (f"tests/commands/{command}",)))
    return mutations


def find_code(code: types.CodeType, function: str) -> types.CodeType | None:
    """Return the code object of a function, found by its qualified name among the code objects nested in `code`."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == function:
                return constant
            if (nested := find_code(constant, function)) is not None:
                return nested
    return None


def mutated_source(mutation: Mutation, source: str) -> str:
    """Return the module's source with the mutation applied. Raises ValueError if its text does not occur once."""
    node: Any = syntax_tree(source)
    for part in mutation.function.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    lines = source.splitlines(keepends=True)
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    if body.count(mutation.old) != 1:
        raise ValueError(f"{mutation.old!r} occurs {body.count(mutation.old)} times in {mutation.function}")
    body = body.replace(mutation.old, mutation.new)
    return "".join([*lines[: node.lineno - 1], body, *lines[node.end_lineno :]])


def apply(mutation: Mutation) -> None:
    """Exchange the function's code in this process; all modules that have imported it call the mutated code."""
    holder: Any = importlib.import_module(mutation.module)
    path = str(holder.__file__)
    code = compile(mutated_source(mutation, Path(path).read_text()), path, "exec", dont_inherit=True)
    for part in mutation.function.split("."):
        holder = inspect.getattr_static(holder, part)
    for attribute in ("fget", "func", "__func__"):  # property, cached_property, classmethod and staticmethod
        holder = getattr(holder, attribute, None) or holder
    inspect.unwrap(holder).__code__ = find_code(code, mutation.function)


class Mutating:
    """A pytest plugin that runs each mutation's tests in a fork of this process, in place of the collected tests."""

    def __init__(self, mutations: list[Mutation]) -> None:
        self.mutations = mutations
        self.results = {"killed": 0, "survived": 0, "error": 0}
        self.log = Path()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()  # otherwise a fork's first collection copies all memory
        items = session.items
        passing: set[str] = set()  # tests that pass without a mutation
        with tempfile.TemporaryDirectory() as folder:
            self.log = Path(folder) / "log"
            for mutation in self.mutations:
                self.log.write_text("")
                session.items = [item for item in items if item.nodeid.startswith(mutation.tests)]
                began = time.monotonic()
                result = {0: "survived", 1: "killed"}.get(self.status_of(mutation, session), "error")
                failed = self.log.read_text()
                if result == "killed" and failed not in passing:  # it has to pass without the mutation
                    session.items = [item for item in items if item.nodeid == failed]
                    if self.status_of(None, session):
                        result = "error"
                    else:
                        passing.add(failed)
                self.results[result] += 1
                line = f"{result:8} {time.monotonic() - began:5.0f} s  {mutation.name}  {failed}"
                print(line, file=sys.__stderr__, flush=True)
        return True

    def status_of(self, mutation: Mutation | None, session: pytest.Session) -> int:
        """Return 0 if all tests pass, 1 if one fails, and 99 for an error."""
        child = os.fork()
        if child == 0:
            status = 99
            try:
                if mutation is not None:
                    apply(mutation)
                with contextlib.suppress(session.Failed):
                    run_tests(session)
                status = int(session.testsfailed > 0)
            except BaseException as error:
                self.log.write_text(repr(error))
            os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.log.write_text(report.nodeid)


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    every_mutation = [*MUTATIONS, *mutations_of_commands()]
    chosen = dict.fromkeys(each for word in words or [""] for each in every_mutation if word in each.name)
    plugin = Mutating(list(chosen))
    files = sorted({path for each in plugin.mutations for path in each.tests})
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not real_model", *files], plugins=[plugin])
    print(", ".join(f"{count} {result}" for result, count in plugin.results.items()), f"of {len(plugin.mutations)}")
    return int(plugin.results["error"] > 0 or sum(plugin.results.values()) < len(plugin.mutations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
