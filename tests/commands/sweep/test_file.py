"""The file of a sweep: its cells, their options and states, and what is refused in one line."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rehearse import SWEEPS
from support.figures import quick_sweeps
from support.made_up_runs import made_up, save
from support.naming import naming

import sinkscope
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.sweep.cells import MEMORY_MARGIN, CellFolders, Failure, Planned, planned
from sinkscope.commands.sweep.command import SweepRun, arms_of, check, costs_of, figures_of
from sinkscope.commands.sweep.file import known_sweeps, read_sweep
from sinkscope.commands.sweep.tables import SweepTables
from sinkscope.commands.sweep.worker import Group, Reads, State, changes
from sinkscope.commands.train.architectures import architecture
from sinkscope.commands.train.arms import parse_methods
from sinkscope.commands.train.cost import GPUS, Cost
from sinkscope.errors import InputError
from sinkscope.measuring.memory import LIBRARY_BYTES
from sinkscope.models.loading import on_meta
from sinkscope.options.recipe import shipped
from sinkscope.output.run import Run


def written(folder: Path, content: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(f"title: Tiny models\n{content}\n", encoding="utf-8")
    return path


def test_cells_are_in_the_order_of_models_commands_inputs_and_settings(tmp_path: Path) -> None:
    content = """
models: [{model: a/b, revisions: [r, s]}, c/d]
inputs: [natural, random]
settings: {epsilon: [0.2, 0.3], seed: [0, 1]}
commands: {analyze: , intervene: {inputs: [random], settings: {}, options: {do: mask-sink}}}
"""
    cells = read_sweep(str(written(tmp_path, content)), {}).cells
    settings = [f"epsilon={epsilon},seed={seed}" for epsilon in (0.2, 0.3) for seed in (0, 1)]
    grid = [f"{reads} × {setting} (analyze)" for reads in ("natural", "random") for setting in settings]
    expected = [
        f"{model} × {coordinates}" for model in ("b r", "b s", "d") for coordinates in [*grid, "random (intervene)"]
    ]
    assert [cell.description for cell in cells] == expected
    assert len({cell.name for cell in cells}) == len(cells)
    trusted = read_sweep(str(tmp_path / "sweep.yaml"), {"trust_remote_code": True, "allow_pickle": True}).cells
    assert all(cell.options.trust_remote_code and cell.options.allow_pickle for cell in trusted)
    assert [cell.name for cell in trusted] == [cell.name for cell in cells]  # a permission measures nothing again
    assert all(f"epsilon={cell.options.epsilon},seed={cell.options.seed}" in (cell.setting or "epsilon=0.3,seed=0")
        for cell in cells)  # fmt: skip


def test_the_nearest_option_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
models:
  - {model: a/b, options: {num-seqs: 3, seq-len: 4, seed: 5}}
  - {model: c/d, revisions: [step0, 512], instead: {natural: random}}
inputs: {natural: , long: {input: code, seed: 7, seq-len: 5}, narrow: {input: code, window: 3}}
settings: {seq-len: [8, 128]}
commands: {analyze: , claims: {inputs: [natural], settings: {}, options: {draws: 2, seq-len: 128}}}
options: {num-seqs: 9, seed: 1}
""",
    )
    with pytest.raises(InputError, match="a text"):  # for model d, claims would read random tokens
        read_sweep(str(path), {})
    path.write_text(path.read_text().replace("natural: random", "natural: code"))
    cells = {cell.description: cell.options for cell in read_sweep(str(path), {"dtype": "bfloat16"}).cells}
    assert len(cells) == 3 * 2 + 1 + 2 * (3 * 2 + 1)
    assert cells["b × long × seq-len=128 (analyze)"].model_dump(include={"num_seqs", "seed", "window", "input"}) == {
        "num_seqs": 3, "seed": 7, "window": 128, "input": "code",
    }  # fmt: skip
    assert cells["d 512 × code (claims)"].model_dump(include={"draws", "seed", "num_seqs", "dtype", "revision"}) == {
        "draws": 2, "seed": 1, "num_seqs": 9, "dtype": "bfloat16", "revision": "512",
    }  # fmt: skip
    lengths = {name: (options.seq_len, options.window) for name, options in cells.items()}
    assert lengths["b × narrow × seq-len=128 (analyze)"] == (128, 3)
    assert [lengths[name] for name in ("b × natural (claims)", "d 512 × code (claims)")] == [(4, 4), (128, 64)]


def test_models_and_inputs_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "steps" / "step1").mkdir(parents=True)
    content = f"""
models:
  - {{model: {tmp_path / "steps"}, revisions: [step1]}}
  - {{model: org/one-1.4b, instead: {{natural: random}}}}
  - {{model: {tmp_path / "two.q4.gguf"}, instead: {{natural: , random: }}}}
inputs: {{natural: , random: , mine: {{dataset: org/data}}}}
"""
    cells = read_sweep(str(written(tmp_path, content)), {}).cells
    assert {(cell.model, *cell.source) for cell in cells} == {
        ("steps", str(tmp_path / "steps" / "step1"), None), ("one-1.4b", "org/one-1.4b", None),
        ("two.q4", str(tmp_path / "two.q4.gguf"), None),
    }  # fmt: skip
    assert [cell.input for cell in cells if cell.model == "one-1.4b"] == ["random", "mine"]
    assert (cells[-1].options.input, cells[-1].options.dataset) == ("natural", "org/data")


def test_small_forms_and_names_of_methods() -> None:
    whole, small = (read_sweep("when-sinks-emerge-text-operations", {}, quick).cells for quick in (False, True))
    assert [cell.setting for cell in whole if ",seed=0" in cell.setting] == [cell.setting for cell in small]
    assert [cell.setting for cell in whole[2:4]] == ["method=none,seed=2", "method=sigmoid,seed=0"]
    assert list(parse_methods(whole[3].options.method)) == ["sigmoid"]
    with pytest.raises(InputError, match="occurs twice"):
        read_sweep("when-sinks-emerge-text-operations", {"seed": 0})
    with pytest.raises(InputError, match="it has no small form for --quick"):
        read_sweep("offline-models", {}, quick=True)
    options = read_sweep("when-sinks-emerge-data", {"dtype": "float32"}, quick=True).cells[0].options
    assert (options.dtype, options.steps) == ("float32", 200)


def test_a_file_has_the_options_and_the_small_form_of_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("""
title: Base
commands: {train: {options: {config: "tiny-llama:vocab_size=300", steps: 100, seeds: 2}, settings: {seed: [5, 6]}}}
options: {num-seqs: 9, seq-len: 32}
quick: {steps: 3, config: {hidden_size: 32, num_attention_heads: 2}, num-seqs: 4}
figures: [retrofit-bars]
""")
    content = f"""
extends: {tmp_path / "base.yaml"}
commands:
  train:
    options: {{steps: 50}}
    settings: {{together: [{{config: tiny-llama, learning-rate: 0.1}}, {{learning-rate: 0.2, weight-decay: 0.3}}]}}
options: {{num-seqs: 8}}
quick: {{num-seqs: 2}}
"""
    path = written(tmp_path, content)
    names = ("config", "steps", "seeds", "learning_rate", "weight_decay", "num_seqs", "seed")
    rows = [
        [getattr(cell.options, name) for name in names]
        for quick in (False, True) for cell in read_sweep(str(path), {}, quick).cells
    ]  # fmt: skip
    named, fields = "tiny-llama:vocab_size=300", "hidden_size=32,num_attention_heads=2"
    assert rows == [
        ["tiny-llama", 50, 2, 0.1, 0.1, 8, 0],
        [named, 50, 2, 0.2, 0.3, 8, 0],
        [f"tiny-llama:{fields}", 3, 2, 0.1, 0.1, 2, 0],
        [f"{named},{fields}", 3, 2, 0.2, 0.3, 2, 0],
    ]
    settings = [cell.setting for cell in read_sweep(str(path), {}).cells]
    assert settings == ["config=tiny-llama,learning-rate=0.1", "learning-rate=0.2,weight-decay=0.3"]
    assert {cell.options.num_seqs for cell in read_sweep(str(path), {"num_seqs": 7}, quick=True).cells} == {7}
    assert read_sweep(str(path), {}).content.figures == ("retrofit-bars",)
    path = written(tmp_path, f"{content}figures: [retrofit-values]")
    assert read_sweep(str(path), {}).content.figures == ("retrofit-values",)


def test_fields_of_a_small_configuration_are_added_to_the_default_and_left_out_elsewhere(tmp_path: Path) -> None:
    content = "commands: {train: {options: {steps: 10}}, analyze: {}}\nmodels: [{name: org/model}]\n"
    path = written(tmp_path, f"{content}quick: {{config: {{num_hidden_layers: 2}}, num-seqs: 3}}")
    cells = {cell.command: cell.options for cell in read_sweep(str(path), {}, quick=True).cells}
    assert cells["train"].config == "tiny-llama:num_hidden_layers=2"
    assert cells["analyze"].num_seqs == 3


def test_a_dry_run_says_what_trainings_take(tmp_path: Path) -> None:
    content = "commands: {train: {options: {method: [none, vga], seeds: 3}, settings: {steps: [100, 200]}}}"
    done = sinkscope.sweep(written(tmp_path, content), out=tmp_path / "out", dry_run=True)
    table = costs_of(done.plan, "A100")
    costs = [Cost(on_meta(architecture("tiny-llama")), cell.options) for cell in done.sweep.cells]
    hours = [6 * cost.hours(GPUS["A100"]) for cost in costs]
    assert table["arms"].tolist() == [6, 6, ""]
    assert table["steps"].tolist() == ["100", "200", ""]
    assert table["hours on one A100"].tolist() == [f"{x:,.1f}" for x in (*hours, sum(hours))]
    assert table["tokens of an arm"].tolist() == ["0.000205 B", "0.00041 B", ""]
    # weights, activations and the libraries; the margin of the plan is for what is freed late
    assert [each.memory for each in done.plan] == [
        int(MEMORY_MARGIN * (LIBRARY_BYTES + int(cost.memory))) for cost in costs
    ]
    assert costs[0].memory > 20 * costs[0].parameters
    assert costs_of([], "H100").empty


def test_a_dry_run_says_what_each_arm_answers(tmp_path: Path) -> None:
    methods = (
        "{plain: none, scaled: vscale, fixed: 'vscale:learned=false', gate: 'vga:placement=output', bias: key-bias}"
    )
    done = sinkscope.sweep(written(tmp_path, f"commands: {{train: {{options: {{method: {methods}}}}}}}"),
        out=tmp_path / "out", dry_run=True)  # fmt: skip
    table = arms_of(done.plan).set_index("arm")
    answers = table["claims that read it"].str.replace(" (one seed decides none)", "").str.split(", ").to_dict()
    assert table["method"].to_dict() == {
        "plain": "none", "scaled": "vscale", "fixed": "vscale:learned=false", "gate": "vga:placement=output",
        "bias": "key-bias",
    }  # fmt: skip
    assert {"GS-21", "GS-35"} <= {*answers["scaled"]} & {*answers["fixed"]}
    assert "GS-32" not in {*answers["scaled"]} | {*answers["fixed"]}  # it needs a valve of values, too
    assert "V-14" in answers["gate"]
    assert not {"V-26", "V-27"} & {*answers["gate"]}  # they need all methods of the paper
    assert not {"V-21", "V-22"} & {*answers["gate"]}  # of a retrofit
    assert not {"V-6", "V-7"} & {*answers["gate"]}  # of another text
    assert answers["plain"] == ["W-30; the others are compared with it"]
    assert (table["seeds"] == 1).all()
    assert table["claims that read it"]["gate"].endswith(" (one seed decides none)")
    assert arms_of([]).empty


ANSWERS = {  # of the plain arm
    "when-sinks-emerge-weight-decay": "W-30, W-38, V-4, V-5, V-8; the others are compared with it",
    "when-sinks-emerge-batches": "W-30, W-33, V-4, V-5, V-8",
    "when-sinks-emerge-60m-learning-rate": "W-30, W-31, W-32 (one seed decides none)",
    "when-sinks-emerge-60m-data": "W-30, W-34 (one seed decides none)",
    "when-sinks-emerge-60m-positions": "W-30, W-42 (one seed decides none)",
    "when-sinks-emerge-60m-windows": "W-30, W-40 (one seed decides none)",
    "when-sinks-emerge-60m-blocks": "W-30, W-45, W-46 (one seed decides none)",
    "when-sinks-emerge-60m-random-tokens": "W-30, W-35, W-36 (one seed decides none)",
    "when-sinks-emerge-1b": "W-30 (one seed decides none); the others are compared with it",
    "outlier-safe": "W-30, V-4, V-5, V-8, OQ-1; the others are compared with it",
}


@pytest.mark.slow
def test_levels_of_a_factor_are_for_its_claims(tmp_path: Path) -> None:
    for name, expected in ANSWERS.items():
        with naming(name):
            table = arms_of(sinkscope.sweep(name, out=tmp_path / name, dry_run=True).plan)
            assert table.loc[table["method"] == "none", "claims that read it"].item() == expected
    both = arms_of(sinkscope.sweep("when-sinks-emerge-60m-sigmoid", out=tmp_path / "out", dry_run=True).plan)
    assert both["claims that read it"][1] == "W-56, W-58 (one seed decides none)"


# what the paper says of its default model, and the rows of each table: the options that vary, level by level
DEFAULT_OF_WSE = {
    "block_length": 2048, "steps": 20_000, "learning_rate": 4e-4, "schedule": "cosine",
    "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip": 1.0, "tokens": 5 * 10**9, "num_seqs": 100, "window": 64,
    "bos": "never", "random_tokens": 0, "fixed_position": None, "batch_size": 8,
}  # fmt: skip
SIZE_OF_WSE = {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8}
ROWS_OF_WSE: dict[str, list[dict]] = {
    "60m": [{}],
    "60m-weight-decay": [{"weight_decay": x} for x in (0, 0.001, 0.01, 0.1, 0.5, 1, 2, 5)],
    "60m-positions": [
        {"position_scheme": x} for x in ("none", "absolute", "learned", "relative", "alibi", "rotary")
    ],
    "60m-learning-rate": [
        {"learning_rate": rate, "steps": 1000 * steps}
        for rate, steps in ((8e-4, 10), (8e-4, 20), (4e-4, 20), (2e-4, 20), (2e-4, 40), (1e-4, 20), (1e-4, 80))
    ],
    "60m-batches": [{"batch_size": x} for x in (2, 4, 8, 16)],  # 0.25 to 2 million tokens
    "60m-fixed-token": [{"fixed_position": x} for x in (0, 1, 2)],
    "60m-random-tokens": [{"random_tokens": x} for x in (0, 1, 2)],
    "60m-blocks": [
        {}, *({"feed_forward": x} for x in ("geglu", "reglu", "swish", "gelu", "relu")), {"norm_placement": "post"},
        {"head_mix": "summed"}, *({"num_attention_heads": x} for x in (1, 2, 4)), {"prefix_length": 5},
    ],
    "60m-windows": [*({"sliding_window": x} for x in (64, 128, 256, 512, 1024)), {}],
    "60m-data": [{"tokens": 10**6 * x} for x in (50, 100, 200, 500, 1000, 5000)],
    "60m-sigmoid": [
        {"learning_rate": rate, "weight_decay": decay}
        for rate, decay in ((4e-4, 0.1), (1e-3, 0.1), (1e-4, 0.1), (4e-4, 0), (4e-4, 0.5), (4e-4, 1))
    ],
    "60m-biases": [{"max_position_embeddings": 2049}],
    "60m-operations": [{}],
}  # fmt: skip
ARMS_OF_WSE = {
    "60m-biases": ["none", "register-tokens", "key-bias", "key-bias", "value-bias", *["key-bias"] * 15],
    "60m-operations": ["none", *["operation"] * 13],
    "60m-sigmoid": ["none", "operation"],
}


@pytest.mark.parametrize("name", ROWS_OF_WSE)
def test_the_sweeps_of_the_60m_model_are_the_papers_but_for_one_factor(name: str) -> None:
    cells = read_sweep(f"when-sinks-emerge-{name}", {}).cells
    assert len(cells) == len(ROWS_OF_WSE[name])
    for cell, row in zip(cells, ROWS_OF_WSE[name], strict=True):
        config = architecture(cell.options.config).to_dict()
        default = architecture("llama-60m").to_dict()
        expected = DEFAULT_OF_WSE | {key: value for key, value in row.items() if key in DEFAULT_OF_WSE}
        assert {key: getattr(cell.options, key) for key in expected} == expected
        assert cell.options.warmup * cell.options.steps == pytest.approx(100)
        derived = {"num_key_value_heads", "head_dim", "hidden_act", "layer_types"}
        differs = {key for key in default if config[key] != default[key]} - derived
        of_model = {key: value for key, value in row.items() if key not in DEFAULT_OF_WSE and default[key] != value}
        assert differs == of_model.keys()
        assert {key: config[key] for key in of_model} == of_model
        assert {key: default[key] for key in SIZE_OF_WSE} == SIZE_OF_WSE
        if name != "60m-batches":
            assert cell.options.batch_size * cell.options.accumulation * cell.options.block_length == 2**20
        methods = [method for method, _ in parse_methods(cell.options.method).values()]
        assert methods == ARMS_OF_WSE.get(name, ["none"])


def test_the_sweep_of_1b_is_that_of_the_released_code() -> None:
    """Its configuration tinyllama_1_1b, as its configs/tinyllama_1b.yaml and tinyllama_1b_sigmoid.yaml train it."""
    (cell,) = read_sweep("when-sinks-emerge-1b", {}).cells
    options, config = cell.options, architecture(cell.options.config)
    assert (config.num_hidden_layers, config.num_attention_heads) == (22, 16)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (2048, 5632, 50432)
    assert (options.steps, options.steps * options.warmup) == (40_000, 100)
    assert options.batch_size * options.accumulation * options.block_length == 2**20
    assert options.learning_rate == 4e-4
    assert [method for method, _ in parse_methods(options.method).values()] == ["none", "operation"]


# VGA's tables: blocks in a step, and warm-up in steps; of BERT and OPT in the published scripts of Bondarenko et al.
# (2023), which the paper follows, and of GPT-2 in Karpathy's nanoGPT with the paper's number of iterations
OF_VGA: dict[str, dict[str, Any]] = {
    "bert-base": {"steps": 10**6, "learning_rate": 1e-4, "block_length": 128, "blocks": 256, "warmup": 10_000,
        "weight_decay": 0.01, "beta2": 0.999, "schedule": "linear"},
    "opt-125m": {"steps": 125_000, "learning_rate": 4e-4, "block_length": 512, "blocks": 48 * 4, "warmup": 2_000,
        "weight_decay": 0.1, "beta2": 0.95, "schedule": "linear"},
    "gpt2": {"steps": 600_000, "learning_rate": 6e-4, "block_length": 1024, "blocks": 12 * 40, "warmup": 2_000,
        "weight_decay": 0.1, "beta2": 0.95, "schedule": "cosine"},
}  # fmt: skip
METHODS_OF_VGA = [
    "none", "register-tokens:deviation=0.02", "learnable-sink", "iga:placement=output,scale=1",
    "vga:placement=output,scale=1", "vga:placement=value,scale=1",
]  # fmt: skip
SIZES_OF_VGA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


@pytest.mark.parametrize("name", OF_VGA)
def test_the_sweeps_of_vga_are_the_papers(name: str) -> None:
    (cell,) = read_sweep(f"value-state-gated-attention-{name}", {}).cells
    options, expected = cell.options, OF_VGA[name]
    settings = {key: getattr(options, key) for key in expected.keys() - {"blocks", "warmup"}}
    settings["blocks"] = options.batch_size * options.accumulation
    settings["warmup"] = round(options.warmup * options.steps)
    assert settings == expected
    assert options.new_learning_rate == options.learning_rate  # one rate for all parameters
    assert list(options.method.values()) == METHODS_OF_VGA
    config = architecture(options.config)
    assert {key: getattr(config, key) for key in SIZES_OF_VGA} == SIZES_OF_VGA


@pytest.mark.parametrize(("name", "millions"), [("100m", (90, 150)), ("300m", (250, 350))])
def test_the_sweeps_of_gs_are_what_the_paper_says(name: str, millions: tuple[int, int]) -> None:
    """It gives data, optimizer, sizes and checkpoints; arms have equal settings, and decide GS-21 to GS-36."""
    (cell,) = read_sweep(f"gradient-sinks-{name}", {}).cells
    options = cell.options
    assert (options.dataset, options.optimizer, options.save_every) == ("allenai/c4:en", "adamw", 1000)
    size = sum(p.numel() for p in on_meta(architecture(options.config)).parameters()) / 1e6
    assert millions[0] < size < millions[1]
    assert parse_methods(options.method)["V-scale"] == ("vscale", {})  # learned, as in the paper
    assert {"attention", "activation", "gradient", "gradient-identities"} <= {*options.observables}


def test_the_register_has_the_trainings_and_hours_of_dry_runs_and_what_is_rehearsed() -> None:
    text = (shipped("recipes").parent / "reports" / "papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(\S+)` \| (\d+) \| (\d+) \| .+ \| (yes|no) \|\n", text)
    at_size = "60m|1b$|gradient-sinks|value-state.+(base|125m|gpt2)$"  # table 3 is a fine-tune of minutes
    assert {name for name, *_ in rows} == {name for name in known_sweeps() if re.search(at_size, name)}
    shape = cache(lambda config: on_meta(architecture(config)))
    for name, trainings, hours, rehearsed in rows:
        cells = [cell.options for cell in read_sweep(name, {}).cells]
        arms = [len(parse_methods(options.method)) * options.seeds for options in cells]
        of_arms = [Cost(shape(options.config), options).hours(GPUS["H100"]) for options in cells]
        every = sum(number * one for number, one in zip(arms, of_arms, strict=True))
        assert (int(trainings), int(hours)) == (sum(arms), round(every)), name
        assert (rehearsed == "yes") == (name in SWEEPS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("models: [a/b]\nsettings: {together: [5]}", "`settings.together`: a value is several options"),
        ("extends: nothing\nmodels: [a/b]", "sweep 'nothing' is unknown"),
        ("models: [a/b]\ninput: [random]", "key 'input' is unknown; did you mean 'inputs'?"),
        ("inputs: [random]", "it has no `models`"),
        ("models: [a/b, c/b]", "two models are called b: give one of them another `name`"),
        ("models: [a/b]\ncommands: [train]", "`train` begins without `models`"),
        ("models: [a/b]\ninputs: [natrual]", "b × natrual (analyze): .*did you mean natural?"),
        ("models: [a/b]\nsettings: {seq-len: [12, x]}", "b × natural × seq-len=x (analyze): --seq-len x: it must be"),
        ("models: [a/b]\nsettings: {seed: []}", "`settings.seed`: it has no values"),
        ("models: [{model: a/b, base: c}]", "the `base` of b 'c' is unknown"),
        ("models: [{model: a/b, instead: {code: random}}]", "`instead` of b: 'code' is unknown"),
        ("models: [{model: a/b, instead: {natural: }}]", "every input is left out"),
        ("models: [{model: a/b, revison: x}]", "`models.0.revison`: there is no such key"),
        ("models: [a/b]\ncommands: [kv-plan]", "'kv-plan' is unknown; known: analyze, claims, intervene, quantize"),
        ("models: [a/b]\nfigures: [effects]", "figure 'effects' is of none of these commands: analyze"),
        ("models: [a/b]\noptions: {observables: [attention]}\nfigures: [gradient-norms]", "needs the observable"),
        ("models: [{model: a/b, paper: GPT2}]", "the `paper` of b 'GPT2' is unknown"),
        ("models: [a/b]\noptions: {allow-pickle: true}", "option 'allow_pickle' is for you to give"),
        ("models: [a/b]\ncommands: {benchmark: {options: {task-path: tasks}}}", "task-path tasks: tasks can run code"),
        ("models: [a/b]\ninputs: {a: {input: random}, b: {input: random}}", "occurs twice, also as b × a (analyze)"),
        ("models: [a/b]\ninputs: [random]\ncommands: [claims]", "claims measures random and repeated tokens besides"),
    ],
)
def test_a_faulty_file_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        sinkscope.sweep(path, out=tmp_path / "out")
    told = str(caught.value)
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    assert all(part in told for part in message.split(".*"))
    assert list(tmp_path.iterdir()) == [path]


def test_cells_draw_the_figures_of_their_command(tmp_path: Path) -> None:
    content = "models: [a/b]\ninputs: [random]\ncommands: {analyze: , intervene: {options: {do: mask-sink}}, train: }"
    sweep = read_sweep(str(written(tmp_path, f"{content}\nfigures: [sink-map, effects, retrofit-bars]")), {})
    drawn = {command: figures_of(sweep, command) for command in sweep.content.commands}
    assert drawn == {"analyze": ("sink-map",), "intervene": ("effects",), "train": ("retrofit-bars",)}
    check(sweep)


@pytest.mark.slow
def test_sweeps_that_come_with_sinkscope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.commands.train.blocks.check_source", lambda text: None)  # without `make corpus`
    shape = cache(architecture)  # that many cells share
    for path in sorted((shipped("recipes") / "sweeps").glob("*.yaml")):
        with naming(path.stem):
            sweep = read_sweep(path.stem, {})
            assert sweep.path.resolve() == path
            assert sweep.content.reproduces
            small = read_sweep(path.stem, {}, quick=True) if sweep.content.quick else sweep
            for each in (sweep, small):
                check(each)
                for options in (cell.options for cell in each.cells if cell.command == "train"):
                    registers = any(name == "register-tokens" for name, _ in parse_methods(options.method).values())
                    limit = shape(options.config).max_position_embeddings
                    assert options.block_length + registers <= limit
            assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


def test_a_cell_is_done_with_its_options_its_tables_and_its_figures(models: Path, tmp_path: Path) -> None:
    (cell,) = read_sweep(str(written(tmp_path, f"models: [{models / 'llama'}]\ninputs: [random]")), {}).cells
    folders = CellFolders(tmp_path / "out")
    path = save(made_up(config=cell.options.model_dump(mode="json")), folders.run(cell.name)) / "run.json"
    (tmp_path / "out" / "failed").mkdir()
    manifest = json.loads(path.read_text()) | {"read": Reads().of(cell.options)}
    changed = f"model {models / 'llama'} changed since"

    def state(content: str) -> tuple[State, str]:
        path.write_text(content)
        (each,) = planned([cell], folders, Reads())
        return each.state, each.message

    for differing, expected in (
        ({}, (State.DONE, "")),
        ({"failed": {"arm": "lost"}, "failed_figures": {"x": "too small"}}, (State.DONE, "arm: lost; x: too small")),
        ({"config": manifest["config"] | {"seq_len": 11}}, (State.WAITING, "it was measured with other options")),
        ({"read": {}}, (State.WAITING, changed)),
        ({"read": dict.fromkeys(manifest["read"], "another")}, (State.WAITING, changed)),
        ({"drawn": False}, (State.WAITING, "")),
        ({"tables": []}, (State.WAITING, "")),
    ):
        assert state(json.dumps(manifest | differing)) == expected
    assert state("{") == (State.WAITING, "its folder cannot be read")
    for attempt in (1, 2):
        folders.fail(cell.name, "no memory")
        assert folders.failure(cell.name) == Failure(error="no memory", attempts=attempt)
    assert state("{") == (State.FAILED, "no memory")


def test_cells_of_which_a_part_failed_are_measured_again_only_with_retry(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load needs the memory of its largest cell."""
    asked: list[list[tuple[list[int], int]]] = []

    def run_groups(groups: list[Group], pool: Any) -> list[Any]:
        asked.append([([task.options.seq_len for task in group.tasks], group.memory) for group in groups])
        return []

    quick_sweeps(monkeypatch)
    monkeypatch.setattr("sinkscope.commands.sweep.command.run_groups", run_groups)
    monkeypatch.setattr(Planned, "memory", property(lambda planned: planned.cell.options.seq_len))
    path, out = written(tmp_path, f"models: [{models / 'llama'}]\nsettings: {{seq-len: [8, 64, 32]}}"), tmp_path / "out"
    for cell in sinkscope.sweep(path, out=out, page=False, workers=1).sweep.cells:
        run = made_up(config=cell.options.model_dump(mode="json"))
        failed = {"x": "too small"} if cell.options.seq_len == 32 else {}
        more = {"read": Reads().of(cell.options), "failed_figures": failed}
        save(Run(run.manifest | more, run.tables), out / "cells" / cell.name)
    for options in ({}, {"retry": True}, {"overwrite": True}):
        sinkscope.sweep(path, out=out, page=False, workers=1, **options)
    assert asked == [[([8, 64, 32], 64)], [], [([32], 32)], [([8, 64, 32], 64)]]


def test_a_failure_names_five_causes_and_counts_the_other_cells() -> None:
    plan: list[Any] = [
        SimpleNamespace(cell=SimpleNamespace(name=name), state=State.FAILED if cause else State.DONE, message=cause)
        for name, cause in zip("ABCDEFGHI", ("a", "b", "c", "b", "d", "e", "f", "g", ""), strict=True)
    ]
    told = SweepRun(SimpleNamespace(), plan, SweepTables({}, {}), Path()).failure  # type: ignore[arg-type]
    assert told.startswith("8 of 9 cells failed (--retry tries them again): A: a; B: b; C: c; E: d; F: e; and 3 more")


def test_shards_share_the_cells(models: Path, tmp_path: Path) -> None:
    path = written(tmp_path, f"models: [{models / 'llama'}]\ninputs: [random]\nsettings: {{seed: [0, 1, 2, 3, 4]}}")
    shards = [sinkscope.sweep(path, out=tmp_path / "out", dry_run=True, shard=f"{part}/3").plan for part in (1, 2, 3)]
    names = [cell.name for cell in read_sweep(str(path), {}).cells]
    assert [each.cell.name for shard in shards for each in shard] == names
    assert sorted(map(len, shards)) == [1, 2, 2]


def test_what_a_cell_reads(models: Path, tmp_path: Path) -> None:
    """A dataset replaces the text, and tokens that are drawn are no file."""
    ids, model = tmp_path / "ids.jsonl", str(models / "llama")
    ids.write_text('{"input_ids": [1, 2]}\n')
    for options, read in (({"input": str(ids)}, f"input {ids}"), ({"dataset": str(ids)}, f"dataset {ids}"),
                        ({"dataset": f"{ids}:en"}, f"dataset {ids}:en"),
                        ({"input": "random"}, ""), ({"input": "natural"}, "input natural")):  # fmt: skip
        assert list(Reads().of(AnalyzeOptions(model=model, **options))) == list(filter(None, [f"model {model}", read]))
    for option, names in {
        "task_path": ("task.yaml", "group/task.yaml"), "adapter": ("adapter_config.json", "adapter_model.bin"),
        "tokenizer": ("tokenizer.json",), "config": ("config.json",), "from_": ("run.json",),
    }.items():  # fmt: skip
        folder = tmp_path / option
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        what, value = ("run", [folder]) if option == "from_" else (option, str(folder))
        options = SimpleNamespace(**{option: value})
        for name in names:
            first = Reads().of(options)
            (folder / name).write_text('{"a": 1}')
            assert changes(first, Reads().of(options)) == f"{what} {folder} changed since"
    first = Reads().of(AnalyzeOptions(model=model, input=str(ids)))
    ids.write_text('{"input_ids": [1, 3]}\n')
    assert changes(first, Reads().of(AnalyzeOptions(model=model, input=str(ids)))) == f"input {ids} changed since"
    shutil.copytree(models / "llama", copied := tmp_path / "copied")
    asked = AnalyzeOptions(model=str(copied), input="random")
    for name in ("config.json", "model.safetensors"):
        first = Reads().of(asked)
        (copied / name).write_bytes((copied / name).read_bytes() + b" ")
        assert changes(first, Reads().of(asked)) == f"model {copied} changed since"
