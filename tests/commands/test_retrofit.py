"""`retrofit`: arms trained, saved, measured and compared; broken off and gone on with; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from support.browser import check_page, launched
from support.figures import skip_figures
from support.retrofit_command import SMALL, TYPED, WORDS, command_line, words_tokenizer
from tiny import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import sinkscope
import sinkscope.commands.training_arms
import sinkscope.figures
from sinkscope.commands.retrofit import retrofit
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.figures import OF_ARMS
from sinkscope.figures.training import Arms
from sinkscope.html_page import Contents
from sinkscope.html_page.html import page_data
from sinkscope.measuring.tables import column_names
from sinkscope.models.loading import LoadedModel
from sinkscope.output.run import Run
from sinkscope.output.side_by_side import compare
from sinkscope.output.trained import Trained
from sinkscope.results.tables import LEADING
from sinkscope.retrofits import new_parameters, retrofit_model
from sinkscope.training.arms import parse_methods
from sinkscope.training.blocks import read_blocks


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "drains.txt"
    path.write_text("the drain of the drain and the of of\n" * 40, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def finished(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """From the command line, without the runs' own figures, which take seconds. Not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "out"
    arguments = ("--method", "vga:placement=output,none", "--text", text, *TYPED, "--out", out)
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched, of_runs_only=True)
        return command_line("retrofit", tiny, *arguments), out


def loaded() -> LoadedModel:
    return LoadedModel(tiny_model("llama"), words_tokenizer(), "tiny", "tiny", None, None, ())


# --- the whole ---


def test_it_prints_the_comparison_and_how_far_the_gates_moved(finished: tuple[Result, Path]) -> None:
    result, out = finished
    assert result.exit_code == 0, result.output
    for column in (
        "untouched",
        "vga-placement=output",
        "none",
        "Perplexity",
        "Max infinity norm",
        "Mean kurtosis",
        "W8A8",
    ):
        assert column in result.stdout
    assert "note: vga-placement=output: new parameters moved by" in result.stderr
    assert "differs" not in result.stderr
    assert f"written to {out}" in result.stderr
    assert "\x1b" not in result.output


def test_its_folder(finished: tuple[Result, Path]) -> None:
    out = finished[1]
    assert {path.name for path in out.iterdir()} == {
        "run.json", "retrofit.md", "held-out.npy", "untouched", "vga-placement=output", "none",
        "comparison", "figures", "tables", "index.html",
    }  # fmt: skip
    for arm in ("vga-placement=output", "none"):
        assert {path.name for path in (out / arm).iterdir()} == {"model", "run", "tables"}  # no checkpoints
        run = Run.open(out / arm / "run")
        assert (run.model, run.condition) == ("tiny", arm)
        table = pd.read_parquet(out / arm / "tables" / "training.parquet")
        assert table.columns.tolist() == [*LEADING, *column_names("training")]
        assert sorted(table["step"].unique()) == [1, 2, 3]
        assert set(table["condition"]) == {arm}
    gates = pd.read_parquet(out / "vga-placement=output" / "tables" / "gates.parquet")
    assert gates.columns.tolist() == [*LEADING, *column_names("gates")]
    assert len(gates) == 3 * 4
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["config"]["steps"] == 3
    assert manifest["arms"]["vga-placement=output"]["parameters"] == {"placement": "output"}
    assert manifest["arms"]["vga-placement=output"]["moved"] == pytest.approx(gates["displacement"].max())


def test_its_page(finished: tuple[Result, Path], tmp_path: Path) -> None:
    contents = Contents.of_folder(finished[1])
    assert [finding.numbers["arm"] for finding in contents.findings] == ["vga-placement=output"]
    assert page_data(contents) == page_data(Trained.open(finished[1]).contents)  # a notebook's is the same
    with launched() as browser:
        check_page(browser, contents, tmp_path)


def test_its_tables_in_other_formats(finished: tuple[Result, Path]) -> None:
    printed = command_line("compare", finished[1], "--format", "latex")
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.count(r"\toprule") == len(Trained.open(finished[1]).summary_tables)
    assert command_line("compare", finished[1], "--out", finished[1] / "again").exit_code == 2


def test_all_are_measured_on_what_none_was_trained_on(finished: tuple[Result, Path]) -> None:
    out = finished[1]
    runs = [Run.open(out / arm / "run") for arm in ("untouched", "vga-placement=output", "none")]
    assert len({run.manifest["input"]["sha256"] for run in runs}) == 1
    assert compare(*runs).differing.empty
    held_out = np.load(out / "held-out.npy")
    assert runs[0].manifest["input"]["sequences"] == len(held_out)
    assert all(run.metric("perplexity") > 1 for run in runs)
    assert runs[1].metric("perplexity") != runs[2].metric("perplexity") != runs[0].metric("perplexity")
    assert (out / "comparison" / "run.json").is_file()
    assert (out / "figures" / "retrofit-training.png").is_file()


def test_the_measurement_of_an_arm_can_be_repeated(
    finished: tuple[Result, Path], tmp_path: Path, no_figures: None
) -> None:
    run = finished[1] / "vga-placement=output" / "run"
    result = command_line("analyze", "--from", run, "--out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert Run.open(tmp_path / "again").metric("loss") == Run.open(run).metric("loss")


def test_a_trained_model_loads_as_any_other(finished: tuple[Result, Path]) -> None:
    folder = finished[1] / "vga-placement=output" / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.retrofit["parameters"]["placement"] == "output"
    assert AutoTokenizer.from_pretrained(folder)("the drain")["input_ids"] == [1, 4, 7]
    ids = torch.from_numpy(np.load(finished[1] / "held-out.npy"))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(Run.open(folder.parent / "run").metric("loss"), rel=1e-5)


def test_with_as_many_steps_none_is_a_plain_fine_tune(finished: tuple[Result, Path], tiny: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(finished[1] / "none" / "model")
    before: Any = AutoModelForCausalLM.from_pretrained(tiny)
    assert type(plain) is type(before)
    assert not torch.equal(plain.lm_head.weight, before.lm_head.weight)


# --- broken off and gone on with ---


def test_it_goes_on_where_it_was_broken_off(
    tiny: Path, text: Path, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, train = sinkscope.commands.training_arms.measure, sinkscope.commands.training_arms.train
    trained: list[str] = []

    def breaks(subject: Any, *rest: Any) -> Any:
        if subject.inputs.condition == "none":
            raise KeyboardInterrupt
        return measure(subject, *rest)

    def watched(model: Any, blocks: Any, training: Any, folder: Path, **rest: Any) -> Any:
        trained.append(folder.parent.name)
        return train(model, blocks, training, folder, **rest)

    monkeypatch.setattr(sinkscope.commands.training_arms, "train", watched)
    with monkeypatch.context() as patched:
        patched.setattr(sinkscope.commands.training_arms, "measure", breaks)
        result = command_line("retrofit", tiny, "--text", text, *TYPED, "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "interrupted: what was reached is kept" in result.stderr
    done = retrofit(str(tiny), "vga,none", text=text, out=tmp_path / "out", **SMALL)
    assert trained == ["vga", "none"]
    assert list(done.runs) == ["untouched", "vga", "none"]
    done = retrofit(str(tiny), "iga", text=text, out=tmp_path / "out", **SMALL)  # an arm more
    assert trained == ["vga", "none", "iga"]
    assert list(done.runs) == ["untouched", "vga", "none", "iga"]
    assert [note.partition(":")[0] for note in done.notes] == ["vga", "iga"]
    with pytest.raises(InputError, match=r"holds what `retrofit` made with other options .steps was 3"):
        retrofit(str(tiny), "vga", text=text, out=tmp_path / "out", **SMALL | {"steps": 4})
    text_2 = tmp_path / "drains.txt"
    text_2.write_text("of the drain " * 200)
    with pytest.raises(InputError, match="made with other options"):
        retrofit(str(tiny), "vga", text=text_2, out=tmp_path / "out", **SMALL)
    assert (tmp_path / "out" / "iga" / "run" / "run.json").is_file()


def test_a_training_that_fails_keeps_the_arms_that_are_done(
    tiny: Path, text: Path, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **rest: Any) -> None:
        raise SinkscopeError("writing failed")

    monkeypatch.setattr(sinkscope.commands.training_arms, "train", full)
    with pytest.raises(SinkscopeError, match="writing failed"):
        retrofit(str(tiny), "vga", text=text, out=tmp_path / "out", **SMALL)
    assert (tmp_path / "out" / "untouched" / "run" / "run.json").is_file()


# --- the text ---


def test_blocks_are_the_text_with_a_bos_each_and_its_end_held_out() -> None:
    words = np.random.default_rng(0).integers(4, 8, 150)
    path = Path("words.txt")
    blocks = read_blocks_of(" ".join(WORDS[at] for at in words), path)
    every = np.concatenate([blocks.train, blocks.held_out])
    assert (every[:, 0] == 1).all()
    assert every[:, 1:].flatten().tolist() == words.tolist()
    assert (len(blocks.train), len(blocks.held_out)) == (8, 2)


def read_blocks_of(text: str, path: Path) -> Any:
    path.write_text(text, encoding="utf-8")
    return read_blocks(loaded(), str(path), None, 16, wanted=100, share=0.2)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_no_more_is_read_than_is_trained_on() -> None:
    blocks = read_blocks(loaded(), "natural", None, 16, wanted=18, share=0.1)
    assert (len(blocks.train), len(blocks.held_out)) == (18, 2)


def test_blocks_of_text_need_no_bos() -> None:
    with_it, without = (read_blocks(loaded(), "natural", None, 16, wanted=18, share=0.1, bos=bos) for bos in BOS)
    assert (with_it.train[:, 0] == 1).all()
    assert not (without.train == 1).any()
    assert without.train[:2].flatten()[:30].tolist() == with_it.train[:2, 1:].flatten().tolist()  # the same text


BOS = ("auto", "never")


def test_sampled_blocks_need_no_bos() -> None:
    with_it, without = (read_blocks(loaded(), "sampled", None, 8, wanted=6, share=0.2, bos=bos) for bos in BOS)
    assert (with_it.train[:, 0] == 1).all()
    assert not (without.train[:, 0] == 1).all()


def test_documents_end_with_an_eos() -> None:
    lines = [json.dumps({"text": "the drain"}), json.dumps({"text": "of"})] * 20
    blocks = read_blocks_of("\n".join(lines), Path("lines.jsonl"))
    assert blocks.train[0].tolist() == [1, *([4, 7, 2, 5, 2] * 3)]


def test_a_dataset_and_token_ids_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    Dataset.from_dict({"text": ["the drain", "of"] * 20}).to_parquet(tmp_path / "corpus" / "train.parquet")
    blocks = read_blocks(loaded(), "natural", str(tmp_path / "corpus"), 16, wanted=100, share=0.2)
    assert blocks.train[0].tolist() == [1, *([4, 7, 2, 5, 2] * 3)]
    ids = np.random.default_rng(0).integers(3, VOCAB, (10, 16))
    np.save(tmp_path / "ids.npy", ids)
    blocks = read_blocks(loaded(), str(tmp_path / "ids.npy"), None, 16, wanted=100, share=0.2)
    assert (blocks.train.tolist(), blocks.held_out.tolist()) == (ids[:8].tolist(), ids[8:].tolist())


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "vgaa"), "retrofit 'vgaa' is unknown; did you mean 'vga'?"),
        (("--method", "vga:place=output"), "vga: parameter 'place' is unknown; did you mean 'placement'?"),
        (("--method", "vga,vga"), "--method vga is given twice"),
        (("--steps", "0"), "--steps 0: it must be at least 1"),
        (("--learning-rate", "0"), "--learning-rate 0.0: it must be more than 0"),
        (("--text", "nothing.txt"), "--text nothing.txt: no such file"),
        (("--text", "random"), "--text random: nothing can be learned from it"),
        (("--block-length", "300"), "--block-length 300 is beyond the model's 256 positions"),
        (("--method", "none", "--only-new"), "--method none: --only-new leaves nothing to train"),
        (("--dtype", "float16"), "--dtype float16: gradients overflow in it"),
        (("--device-map", "auto"), "--device-map auto: a model that is trained stays on one GPU"),
        (("--out", "."), "--out . cannot be replaced"),
    ],
)
def test_refusals_write_nothing(options: tuple[str, ...], message: str, tiny: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = command_line("retrofit", tiny, "--out", "out", *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"sinkscope: {message}"), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_text_shorter_than_two_blocks_is_refused(tiny: Path) -> None:
    Path("short.txt").write_text("the drain " * 10)
    result = command_line("retrofit", tiny, "--out", "out", "--text", "short.txt", *TYPED)
    assert result.exit_code == 2
    assert "--text short.txt holds 1 block of 16 tokens, and at least 2 are needed" in result.stderr
    assert not Path("out").exists()


def test_a_retrofitted_model_is_refused(text: Path) -> None:
    retrofit_model(tiny_model("llama"), None, "iga").save_pretrained("iga")
    words_tokenizer().save_pretrained("iga")
    with pytest.raises(InputError, match="has been retrofitted with iga already: apply vga to the model it was made"):
        retrofit("iga", "vga", text=text, out="out", **SMALL)
    assert not Path("out").exists()


@pytest.mark.usefixtures("no_figures")
def test_a_retrofitted_model_is_fine_tuned_with_what_is_in_it(text: Path) -> None:
    before = retrofit_model(tiny_model("llama"), None, "iga")
    before.save_pretrained("iga")
    words_tokenizer().save_pretrained("iga")
    done = retrofit("iga", "none", text=text, out="out", **SMALL)
    after = AutoModelForCausalLM.from_pretrained(done.model("none"))
    assert after.config.retrofit["method"] == "iga"
    moved = {name for name, weight in after.state_dict().items() if not torch.equal(weight, before.state_dict()[name])}
    assert set(new_parameters(after)) <= moved
    assert any("embed_tokens" in name for name in moved)


def test_a_folder_with_something_else_is_refused(tiny: Path, text: Path) -> None:
    Path("out").mkdir()
    Path("out", "thesis.tex").write_text("")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        retrofit(str(tiny), "vga", text=text, out="out", **SMALL)


def test_measuring_options_that_make_no_sense_are_refused(tiny: Path, text: Path) -> None:
    with pytest.raises(InputError, match="option 'seq_len' is unknown"):
        retrofit(str(tiny), "vga", text=text, out="out", seq_len=8)


# --- small things ---


def test_methods_as_they_are_typed() -> None:
    def parsed(*texts: str) -> list[tuple[str, dict]]:
        return [(method.name, dict(method.parameters)) for method in parse_methods(texts)]

    assert parsed("vga,none") == [("vga", {}), ("none", {})]
    assert parsed("vga:placement=output,scale=1,none") == [("vga", {"placement": "output", "scale": "1"}), ("none", {})]
    assert parsed("vga", "register-tokens:count=2") == [("vga", {}), ("register-tokens", {"count": "2"})]
    for wrong in ("", "placement=output"):
        with pytest.raises(InputError):
            parsed(wrong)


def test_methods_that_are_called_something() -> None:
    plain, gated = parse_methods({"plain": "none", "VGA": "vga:placement=output,scale=1"})
    assert (plain.name, plain.label) == ("none", "plain")
    assert (gated.name, gated.label, gated.parameters) == ("vga", "VGA", {"placement": "output", "scale": "1"})
    for name, method in (("a/b", "vga"), ("untouched", "vga"), ("", "vga"), ("both", "vga,iga"), ("x", "vgaa")):
        with pytest.raises(InputError):
            parse_methods({name: method})


def test_a_name_stays_with_its_method(tiny: Path, text: Path, tmp_path: Path, no_figures: None) -> None:
    retrofit(str(tiny), {"mine": "vga"}, text=text, out=tmp_path / "out", observables="attention", **SMALL)
    with pytest.raises(InputError, match="its mine is another method"):
        retrofit(str(tiny), {"mine": "iga"}, text=text, out=tmp_path / "out", observables="attention", **SMALL)


def test_the_figure_without_gates() -> None:
    rows = [("tiny", "none", -1, 0, step, "loss", 1 / step) for step in range(1, 5)]
    table = pd.DataFrame(rows, columns=[*LEADING, *column_names("training")])
    run = Run({"model": {"name": "tiny"}}, {})
    (loss,) = OF_ARMS["retrofit-training"](Arms({"training": table}, {"none": run})).axes  # none for the new parameters
    assert loss.lines[0].get_ydata().tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    with pytest.raises(InputError, match="nothing was logged"):
        OF_ARMS["retrofit-training"](Arms({"training": table.iloc[:0]}, {"none": run}))
