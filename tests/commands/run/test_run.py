"""Recipes: sinkscope's own recipes run, a recipe equals its command, and faulty recipes are refused early."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.figures import skip_figures
from support.naming import naming
from support.retrofit_command import command_line
from support.tables import assert_same_tables
from tiny import VOCAB, tiny_model

import sinkscope
from sinkscope import InputError, Run, run_recipe
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.figures import FIGURES
from sinkscope.options import recipe as recipes
from sinkscope.options.recipe import find_recipe, known_recipes, read_recipe, shipped
from sinkscope.options.register import options_by_command

pytestmark = pytest.mark.usefixtures("here")

SHIPPED = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
TRAINING = [path for path in SHIPPED if not options_by_command()[read_recipe(path).content.command].in_memory]
MEASURING = [path for path in SHIPPED if path not in TRAINING]
SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 16, "positions": 16, "window": 16}
TRAINED: dict[str, Any] = {
    "input": "ids.npy", "steps": 1, "block_length": 16, "batch_size": 2, "num_seqs": 2, "observables": "attention",
    "dataset": None,
}  # fmt: skip
MANY = 2  # methods of a recipe that are trained: its first and its last one
ONE = """
title: A small one
reproduces: nothing
options: {input: random, num-seqs: 2, seq_len: 16, observables: [attention, activation]}
figures: [sink-map]
"""
TWO = """
title: Two
options:
  num-seqs: 2
  seq-len: 16
  observables: attention
runs:
  random: {input: random}
  repeated: {input: repeated}
"""


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "tiny-gpt2"
    model = tiny_model("gpt2")
    model.transformer.wpe.weight[0, 7] = 100.0  # a massive coordinate of EPE_0
    model.save_pretrained(folder)
    return folder


def written(content: str | bytes, name: str = "mine.yaml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(content: str | bytes, model: str | None = "no/such-model", **options: Any) -> str:
    """Return the one line with which a recipe is refused, before a model is looked for."""
    path = written(content)
    with pytest.raises(InputError) as caught:
        run_recipe(path, model, **options)
    message = str(caught.value)
    assert message.startswith("mine.yaml")
    assert "\n" not in message
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]
    return message


def test_recipes_that_come_with_sinkscope() -> None:
    assert known_recipes().keys() >= {path.stem for path in SHIPPED}
    for path in SHIPPED:
        with naming(path.stem):
            recipe = read_recipe(path)
            assert recipe.content.reproduces
            # the user names the model, except where the demo model has no query bias or no checkpoints
            own = {"not-universal": "openai-community/gpt2", "gradient-sinks-checkpoints": "EleutherAI/pythia-160m"}
            assert recipe.content.model == next((own[name] for name in own if path.stem.startswith(name)), None)
            for options in recipe.options({}).values():
                assert isinstance(options, options_by_command()[recipe.content.command])
            assert set(recipe.content.figures) <= set(FIGURES)
            assert known_recipes()[path.stem] == path
            assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


@pytest.mark.parametrize("path", MEASURING, ids=lambda path: path.stem)
def test_it_runs(path: Path, tiny: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    tiny = tiny_gpt2 if path.stem.startswith("not-universal") else tiny

    def save(drawings: Any, folder: Path) -> dict[str, str]:
        drawn.extend(() if "comparison" in folder.parts else drawings)
        return {}

    monkeypatch.setattr("sinkscope.output.result.save_figures", save)
    options = SMALL if not read_recipe(path).content.runs else SMALL | {"input": "random"}
    if path.stem in ("kv-plan", "streaming-perplexity", "massive-activations-ablation", "over-mixing"):
        # too much here
        with pytest.raises(InputError, match=r"window|no massive activations|at least 128 tokens"):
            run_recipe(path.stem, tiny, out="out", **options)
        return
    done = run_recipe(path.stem, tiny, out="out", **options)
    assert set(drawn) == set(done.recipe.content.figures)
    table = {"intervene": "effect", "quantize": "quantization"}.get(done.recipe.content.command, "summary")
    assert all(len(run.tables[table]) for run in done.runs.values())


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_it_trains(path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    np.save("ids.npy", np.random.default_rng(0).integers(3, VOCAB, (12, 16)))
    content = read_recipe(path).content
    fresh = content.command == "train"
    model, options = None if fresh else tiny, TRAINED | ({"seeds": 1} if "seeds" in content.options else {})
    if path.stem.endswith("bert"):  # masking needs a tokenizer
        options = options | {"input": "natural"}
    methods = content.options["method"]
    if len(methods) > MANY:
        some = list(methods)[:: len(methods) - 1]
        methods = {label: methods[label] for label in some} if isinstance(methods, dict) else some
        options = options | {"method": methods}
    done = run_recipe(path.stem, model, out="out", **options)
    assert done.result is not None
    trained = done.result.value
    assert set(trained.tables["retrofit"]["condition"]) - {"untouched"} == set(methods)
    record = json.loads(Path("out/run.json").read_text())["recipe"]
    assert record == done.recipe.record
    if fresh:
        with pytest.raises(InputError, match="option 'model' is unknown"):
            run_recipe(path.stem, tiny, out="other", **options)


def test_a_recipe_is_a_run_folder(tiny: Path) -> None:
    printed = json.loads(command_line("run", written(ONE), tiny, "--out", "printed", "--json").stdout)
    assert printed["metrics"].keys() >= {"sink_rate", "attention_entropy"}
    assert printed["findings"]
    done = run_recipe(written(ONE, "recipes/small.yaml"), tiny)
    assert done.folder == Path("runs/small-tiny")
    assert done.comparison is None
    run = Run.open(done.folder)
    assert run.manifest["recipe"]["name"] == "small"
    options = {"input": "random", "num-seqs": 2, "seq_len": 16, "observables": ["attention", "activation"]}
    assert run.manifest["recipe"]["content"] == {
        "title": "A small one", "reproduces": "nothing", "options": options, "figures": ["sink-map"],
    }  # fmt: skip
    assert run.manifest["config"]["model"] == str(tiny)
    assert {path.name for path in (done.folder / "figures").iterdir()} == {"sink-map.png", "sink-map.pdf"}
    assert (done.folder / "verdict.md").is_file()
    plain = sinkscope.analyze(tiny, **{name.replace("-", "_"): value for name, value in options.items()})
    assert set(run.tables) == set(done.runs[""].tables)
    assert_same_tables(run.tables, plain.tables, check_exact=True)
    with pytest.raises(InputError, match="already holds a run: overwrite=True replaces it"):
        run_recipe("small", tiny)
    with pytest.raises(InputError, match="holds what `analyze` wrote, and is not replaced"):
        run_recipe(written(TWO, "recipes/two.yaml"), tiny, out=done.folder, overwrite=True)


def test_several_runs_are_compared(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = json.loads(command_line("run", written(TWO), tiny, "--out", "printed", "--json").stdout)
    assert {"sink_rate", "attention_entropy"} <= {row["metric"] for row in printed["tables"]["numbers"]}
    assert any("unpaired" in line for line in printed["warnings"])
    fails = {"by-layer": "KeyError"}
    save = "sinkscope.output.result.save_figures"
    monkeypatch.setattr(save, lambda drawings, folder: fails if "comparison" in folder.parts else {})
    with pytest.warns(UserWarning, match="by-layer"):
        done = run_recipe(written(TWO), tiny, out="both", page=False)
    assert "by-layer (KeyError)" in done.failure
    assert len([*Path("printed").rglob("index.html")]) == 3
    assert not [*Path("both").rglob("index.html")]
    assert list(done.runs) == ["random", "repeated"]
    assert done.comparison is not None
    assert list(done.comparison.table.columns[:2]) == ["random", "repeated"]
    assert done.comparison.folder == Path("both/comparison")
    for name in done.runs:
        run = Run.open(Path("both", name))
        assert (run.condition, run.manifest["recipe"]["name"]) == (name, "mine")
    assert json.loads(Path("both/run.json").read_text(encoding="utf-8"))["runs"] == ["random", "repeated"]
    assert Path("both/comparison/tables/comparison.parquet").is_file()
    with pytest.raises(InputError, match="already holds a run"):
        run_recipe("mine.yaml", tiny, out="both")


def test_a_command_with_a_folder_of_its_own_has_the_options_of_output(tiny: Path) -> None:
    path = written("title: x\ncommand: scan\n")
    for options in ({}, {"overwrite": True, "page": False}):
        folder = run_recipe(path, tiny, out="scanned", **options).folder
        assert (folder / "index.html").exists() == options.get("page", True)


def test_given_options_replace_those_of_the_recipe() -> None:
    content = "title: x\nmodel: org/name\noptions: {revision: r, gguf-file: f, dtype: float16, seed: 3}"
    recipe = read_recipe(written(content))
    own = recipe.options({})[""]
    assert (own.model, own.revision, own.dtype, own.seed) == ("org/name", "r", "float16", 3)
    replaced = recipe.options({"model": "another", "dtype": "float32"})[""]
    assert (replaced.model, replaced.revision, replaced.dtype, replaced.seed) == ("another", None, "float32", 3)
    assert (own.gguf_file, replaced.gguf_file) == ("f", None)
    assert recipe.options({"model": "another", "revision": "s"})[""].revision == "s"
    recipe = read_recipe(written("title: x\noptions: {seed: 3}\nruns:\n  as-it-is:\n  other: {seed: 4}\n"))
    assert {name: config.seed for name, config in recipe.options({}).items()} == {"as-it-is": 3, "other": 4}
    recipe = read_recipe(written("title: x\noptions:\nruns:\nfigures:\n"))  # empty keys are ignored
    assert recipe.options({}) == {"": AnalyzeOptions()}


def test_a_recipe_writes_only_below_the_working_directory(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    Path("link").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    Path("loop").symlink_to("loop")
    with pytest.raises(InputError, match="holds characters that no path has"):
        sinkscope.run_recipe(written(ONE + 'out: "\\0"\n'), model=tiny)
    for out in ("/tmp/elsewhere", "../elsewhere", ".", "link/elsewhere", "loop"):
        path = written(ONE + f"out: {out}\n")
        with pytest.raises(InputError, match="does not lie below the working directory"):
            run_recipe(path, tiny)
    assert run_recipe(path, tiny, out="here").folder == Path("here")
    assert run_recipe(written(ONE + "out: there\n"), tiny).folder == Path("there")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mine.yaml is empty: a recipe has at least a title"),
        (b"title: \xff", "mine.yaml is not UTF-8 text"),
        ("title: a: b", "is not YAML: line 1, column 9: mapping values are not allowed here (text with a colon"),
        ("title: !!python/name:os.system", "is not YAML: line 1, column 8: could not determine a constructor"),
        ("titel: x", "key 'titel' is unknown; did you mean 'title'?"),
        ("title: 5", "`title`: it must be text, not 5"),
        ("title: x\nseq-len: 5", "`seq-len` belongs under `options`"),
        ("title: x\noptions: 5", "`options`: it must hold keys and values, as `seq-len: 64`, not 5"),
        ("title: x\nfigures: {a: b}", "`figures`: it must be a list, as [sink-map, sinks-by-layer]"),
        ("title: x\nruns: {a: {}}", "`runs`: there is only one"),
        ("title: x\nruns: {a: {}, ../b: {}}", "`runs`: '../b' cannot be the name of a run"),
        ("title: x\nruns: {a: {}, A: {}}", "`runs`: two names differ only in upper and lower case"),
        ("title: x\ncommand: run", "`command`: a recipe cannot run another recipe"),
        ("title: x\ncommand: train\nruns: {a: {}, b: {}}", "`runs` are for commands that measure one run"),
        ("title: x\noptions: {model: org/name}", "option 'model' belongs next to `options`"),
        ("title: x\ncommand: benchmark\noptions: {task-path: tasks}", "task-path tasks: tasks can run code"),
        ("title: x\nruns: {a: {}, b: {allow_pickle: true}}", "option 'allow_pickle' is for you to give"),
        ("title: x\nmodel: a/b\nruns: {a: {}, b: {revision: 'step0,step512'}}", "each run or cell measures one model"),
        (
            "title: x\nfigures: [massive-map]\noptions: {observables: [attention]}",
            "figure 'massive-map' needs the observable 'massive', which `observables` leaves out",
        ),
        (
            "title: x\nfigures: [sinks-by-layer]\noptions: {observables: [attention]}",
            "figure 'sinks-by-layer' needs the observable 'activation'",
        ),
        (
            "title: x\ncommand: retrofit\noptions: {method: [vga]}\nfigures: [sink-map]",
            "figure 'sink-map' is of `sinkscope analyze`, not of `retrofit`",
        ),
    ],
)
def test_a_faulty_recipe_is_refused_in_one_line(content: str | bytes, message: str) -> None:
    is_own = isinstance(content, str) and ("command: train" in content or "model: a/b" in content)
    assert message in refused(content, None if is_own else "no/such-model")


def test_a_recipe_goes_by_its_name() -> None:
    checkout = SHIPPED[0].parent
    assert find_recipe("gradient-sinks-figure-2") == checkout / "gradient-sinks-figure-2.yaml"
    assert find_recipe("gradient-sinks-figure-2.yaml") == checkout / "gradient-sinks-figure-2.yaml"
    mine = written(ONE, "recipes/gradient-sinks-figure-2.yml")
    assert find_recipe("gradient-sinks-figure-2") == mine  # the working directory comes first
    assert find_recipe("recipes/gradient-sinks-figure-2.yml") == mine
    assert read_recipe(mine).name == "gradient-sinks-figure-2"
    assert find_recipe(written(ONE, "no-ending")) == Path("no-ending")
    for name, message in (
        ("nothing.like.it", "recipe 'nothing.like.it' is unknown; known: "),
        ("gradient-sinks-figure-9.yaml", "no such file; did you mean the recipe 'gradient-sinks-figure-"),
        ("other/gradient-sinks-figure-2.yaml", "no such file; `sinkscope run gradient-sinks-figure-2` finds"),
        (".", "this is a folder"),
    ):
        with pytest.raises(InputError, match=message):
            run_recipe(name)


def test_an_installed_sinkscope_has_its_recipes(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """A wheel has them inside the package; a folder `recipes` next to the package is not sinkscope's."""
    package = here / "site-packages" / "sinkscope"
    shutil.copytree(SHIPPED[0].parent, package / "recipes")
    (package.parent / "recipes").mkdir()
    (package.parent / "recipes" / "not-ours.yaml").write_text("title: x")
    monkeypatch.setattr(recipes, "__file__", str(package / "options" / "recipe.py"))
    assert shipped("recipes") == package / "recipes"
    assert known_recipes().keys() == {path.stem for path in SHIPPED}
    assert find_recipe("gradient-sinks-figure-2").parent == package / "recipes"
