"""`retrofit`: arms are trained, measured, compared and resumed, also after a full disk; wrong input is refused."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from support.figures import skip_figures
from support.retrofit_command import (
    SMALL,
    TYPED,
    WORDS,
    command_line,
    refused,
    succeeded,
    tokenizer_of,
    words_tokenizer,
)
from tiny import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, T5Config, Trainer
from typer.testing import Result

import sinkscope
import sinkscope.commands.train.arms
import sinkscope.output.result
from sinkscope import InputError, Run, compare, new_parameters, retrofit, retrofit_model
from sinkscope.commands.train.arms import CALIBRATION, parse_methods
from sinkscope.commands.train.blocks import Blocks, _tokens_of, read_blocks
from sinkscope.commands.train.options import RetrofitOptions
from sinkscope.commands.train.output import Trained
from sinkscope.measuring.tables import column_names
from sinkscope.models.loading import LoadedModel
from sinkscope.options.option import checked
from sinkscope.results.tables import LEADING

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "drains.txt"
    path.write_text("the drain of the drain and the of of\n" * 40, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def finished(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A retrofit from the command line, without the figures of its runs. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    arguments = ("--method", "vga:placement=output,none", "--text", text, *TYPED, "--out", out)
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched, of_runs_only=True)
        return command_line("retrofit", tiny, *arguments), out


def test_its_folder(finished: tuple[Result, Path]) -> None:
    result, out = finished
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == (out / "retrofit.md").read_text().strip()
    assert "note: vga-placement=output: new parameters moved by" in result.stderr
    assert f"written to {out}" in result.stderr
    printed = command_line("compare", out, "--format", "latex")
    assert printed.stdout.count(r"\toprule") == len(Trained.open(out).summary_tables)
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
    assert manifest["arms"]["vga-placement=output"]["parameters"] == {"placement": "output"}
    assert manifest["arms"]["vga-placement=output"]["moved"] == pytest.approx(gates["displacement"].max())


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


def test_a_trained_model_loads_as_any_other(finished: tuple[Result, Path], tiny: Path) -> None:
    folder = finished[1] / "vga-placement=output" / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.retrofit["parameters"]["placement"] == "output"
    assert AutoTokenizer.from_pretrained(folder)("the drain")["input_ids"] == [1, 4, 7]
    ids = torch.from_numpy(np.load(finished[1] / "held-out.npy"))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(Run.open(folder.parent / "run").metric("loss"), rel=1e-5)
    plain, before = map(AutoModelForCausalLM.from_pretrained, (finished[1] / "none" / "model", tiny))
    assert type(plain) is type(before)
    assert not torch.equal(plain.lm_head.weight, before.lm_head.weight)


@pytest.mark.slow
def test_it_goes_on_where_it_was_broken_off(
    tiny: Path, text: Path, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arms have the ranges of their W8A8 from the same blocks of the text that they are trained on."""
    measure, train = sinkscope.commands.train.arms.measure, sinkscope.commands.train.arms.train_model
    costs, trained, read, calibrated = sinkscope.commands.train.arms.w8a8, list[str](), list[Blocks](), list[Any]()

    def breaks(subject: Any, *arguments: Any) -> Any:
        if subject.inputs.condition == "none":
            raise KeyboardInterrupt
        return measure(subject, *arguments)

    def watched(model: Any, blocks: Any, training: Any, folder: Path, **arguments: Any) -> Any:
        trained.append(folder.parent.name)
        read.append(blocks)
        return train(model, blocks, training, folder, **arguments)

    def quantized(subject: Any, calibration: Any, **arguments: Any) -> Any:
        calibrated.append(np.stack(calibration.sequences))
        return costs(subject, calibration, **arguments)

    monkeypatch.setattr(sinkscope.commands.train.arms, "train_model", watched)
    monkeypatch.setattr(sinkscope.commands.train.arms, "w8a8", quantized)
    with monkeypatch.context() as patched:
        patched.setattr(sinkscope.commands.train.arms, "measure", breaks)
        result = command_line("retrofit", tiny, "--text", text, *TYPED, "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "interrupted: what was reached is kept" in result.stderr
    done = retrofit(str(tiny), "vga,none", text=text, out=tmp_path / "out", **SMALL)
    assert trained == ["vga", "none"]
    assert list(done.runs) == ["untouched", "vga", "none"]
    done = retrofit(str(tiny), "iga", text=text, out=tmp_path / "out", **SMALL)  # one more arm
    assert trained == ["vga", "none", "iga"]
    assert list(done.runs) == ["untouched", "vga", "none", "iga"]
    assert all("moved" in arm for arm in done.manifest["arms"].values())
    assert done.runs["vga"].manifest["input"]["sequences"] == 1
    measured_on = "one held-out sequence, which may not stand for others"
    assert f"All arms were measured on {measured_on}." in done.verdict
    compared = [f"{method}, compared with plain training on {measured_on}" for method in ("vga", "iga")]
    assert [note.partition(":")[0] for note in done.notes] == [*compared, "vga", "iga"]
    assert (tmp_path / "out" / "iga" / "run" / "run.json").is_file()
    assert len(calibrated) == 4
    assert all(np.array_equal(ids, read[0].train[:CALIBRATION]) for ids in calibrated)


def test_models_that_are_not_kept_are_not_trained_again(
    tiny: Path, text: Path, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SMALL | {"text": text, "out": tmp_path / "out", "save_models": "none"}
    done = retrofit(str(tiny), "vga,none", **options)
    assert {path.name for path in (tmp_path / "out" / "vga").iterdir()} == {"run", "tables"}
    with pytest.raises(InputError, match="its model was not kept"):
        done.model("vga")
    monkeypatch.setattr(sinkscope.commands.train.arms, "train_model", lambda *_, **__: pytest.fail("trained again"))
    assert retrofit(str(tiny), "vga,none", **options).verdict == done.verdict


def test_blocks_are_the_text_with_a_bos_each_and_its_end_held_out() -> None:
    ids = np.random.default_rng(0).integers(3, VOCAB, (10, 16))
    np.save("ids.npy", ids)
    blocks = blocks_of("ids.npy")
    assert (blocks.train.tolist(), blocks.held_out.tolist()) == (ids[:8].tolist(), ids[8:].tolist())
    words = np.random.default_rng(0).integers(4, 8, 150)
    blocks = blocks_of("words.txt", " ".join(WORDS[at] for at in words))
    every = np.concatenate([blocks.train, blocks.held_out])
    assert (every[:, 0] == 1).all()
    assert every[:, 1:].flatten().tolist() == words.tolist()
    assert (len(blocks.train), len(blocks.held_out)) == (8, 2)
    lines = [json.dumps({"text": "the drain"}), json.dumps({"text": "of"})] * 20  # documents end with an EOS
    assert blocks_of("lines.jsonl", "\n".join(lines)).train[0].tolist() == [1, *([4, 7, 2, 5, 2] * 3)]
    lines = [line.replace('"the', f'"{WORDS[1]} the') for line in lines]  # as a template renders them
    assert blocks_of("lines.jsonl", "\n".join(lines)).train[0].tolist() == [1, *([4, 7, 2, 5, 2] * 3)]


@pytest.mark.parametrize("name", ["eos_token", "sep_token"])
def test_documents_are_apart_by_their_end_even_if_its_id_is_0(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are tokenized in pieces are split at the ends of lines, and have one end."""
    tokenizer = tokenizer_of(("</s>", "<unk>", "of", "and"), None, unk_token="<unk>", **{name: "</s>"})
    for piece in (100, 9):
        monkeypatch.setattr("sinkscope.commands.train.blocks.PIECE", piece)
        assert [*_tokens_of(tokenizer, "text", ("of and\nand of\n", "and"), (), 4)] == [2, 3, 3, 2, 0, 3, 0]


def test_blocks_of_a_causal_model_have_no_suffix_and_with_bos_never_no_prefix() -> None:
    words = np.random.default_rng(0).integers(4, 8, 600)
    text = " ".join(WORDS[at] for at in words)
    framed = tokenizer_of(WORDS, "<s> $A </s>", unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    assert blocks_of("words.txt", text).sha256 == blocks_of("words.txt", text, framed).sha256
    blocks = blocks_of("words.txt", " ".join(text.split()[: 9 * 16]), bos="never")
    assert np.concatenate([blocks.train, blocks.held_out]).flatten().tolist() == words[: 9 * 16].tolist()
    assert len(blocks.held_out) == 2  # a fifth of 9 is 1.8
    assert blocks_of("words.txt", text, block_length=256).train.shape == (1, 256)  # all positions of the model


def test_blocks_and_registers_fit_into_the_positions(models: Path, text: Path) -> None:
    for length, message in ((255, "blocks of 255 tokens and 2 registers are beyond"), (254, "holds 1 block of 254")):
        options = SMALL | {"text": text, "block_length": length}
        with pytest.raises(InputError, match=message):
            retrofit(str(models / "gpt2"), "none,register-tokens:count=2", out="out", **options)


def test_of_a_dataset_the_first_blocks_are_held_out_and_no_more_is_read_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out blocks are the same for every --tokens; 100 blocks to train on and 25 to measure are wanted."""
    (tmp_path / "stories").mkdir()
    picked = np.random.default_rng(0).integers(4, 8, 2000).tolist()
    lines = [
        json.dumps({"text": " ".join(WORDS[at] for at in picked[start : start + 14])}) for start in range(0, 2000, 14)
    ]
    (tmp_path / "stories" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    read: list[str] = []
    whole = sinkscope.commands.train.blocks.documents

    def counted(*source: Any) -> Any:
        name, texts = whole(*source)
        return name, (read.append(text) or text for text in texts)

    monkeypatch.setattr(sinkscope.commands.train.blocks, "documents", counted)
    every = blocks_of("natural", dataset=str(tmp_path / "stories"))
    assert (len(every.train), len(every.held_out), len(read)) == (100, 25, 125)  # a document, its end and a BOS each
    read.clear()
    few = blocks_of("natural", dataset=str(tmp_path / "stories"), tokens=16 * 10)
    assert len(read) == 35
    assert few.held_out.tolist() == every.held_out.tolist()
    assert few.train.tolist() == every.train[:10].tolist()
    read.clear()
    much = blocks_of("natural", dataset=str(tmp_path / "stories"), tokens=16 * 135)
    assert (much.sha256, len(read)) == (every.sha256, 125)
    assert len(blocks_of("natural", dataset=str(tmp_path / "stories"), eval_share=0.25).held_out) == 34  # of 33.3
    rows = np.concatenate([every.held_out, every.train])
    assert rows[0].tolist() == [1, *picked[:14], 2]
    assert rows[:, 1:-1].flatten().tolist() == picked[: 125 * 14]
    assert every.train.dtype.itemsize == 1  # a vocabulary below 256


def blocks_of(file: str, text: str | None = None, tokenizer: Any = None, **more: Any) -> Blocks:
    if text is not None:
        Path(file).write_text(text, encoding="utf-8")
    options = checked(RetrofitOptions, {"text": file, "block_length": 16, "eval_share": 0.2, **more})
    loaded = LoadedModel(tiny_model("llama"), tokenizer or words_tokenizer(), "tiny", "tiny", None, None, ())
    return read_blocks(loaded, options, wanted=100)


RETROFIT_REFUSALS = [
    (("--method", "vgaa"), "retrofit 'vgaa' is unknown; did you mean 'vga'?"),
    (("--method", "vga:place=output"), "vga: parameter 'place' is unknown; did you mean 'placement'?"),
    (("--method", "vga,vga"), "--method vga is given twice"),
    (("--learning-rate", "-1e-4"), "--learning-rate -0.0001: it must be more than 0"),
    (("--text", "nothing.txt"), "--text nothing.txt: no such file"),
    (("--text", "random"), "--text random: nothing can be learned from it"),
    (("--text", "../short.txt", *TYPED), "--text ../short.txt holds 1 block of 16 tokens, and at least 2 are needed"),
    (("--block-length", "300"), "--block-length 300 is beyond the model's 256 positions"),
    (("--only-new", "--optimizer", "muon"), "--optimizer muon is for the model's own matrices, which --only-new does"),
    (("--method", "none", "--only-new"), "--method none: --only-new leaves nothing to train"),
    (("--out", "../taken"), "--out ../taken is not empty and holds no run"),
]
TRAIN_REFUSALS = [
    (("--config", "tiny-lama"), "--config 'tiny-lama' is unknown; did you mean 'tiny-llama'?"),
    (("--config", "../t5.json"), "--config ../t5.json: t5 is neither a causal language model nor an encoder"),
    (("--config", "../half.json"), "--config ../half.json is not a model's config.json"),
    (("--config", "../nothing.json"), "--config ../nothing.json: it has no model_type"),
    (("--seeds", "0"), "--seeds 0: it must be at least 1"),
    (("--text", "sampled"), "--text sampled: a model with random weights cannot write a text"),
    (("--text", "bigram-backcopy", "--tokenizer", "."), "--text bigram-backcopy has its own tokenizer"),
    (("--tokenizer", "./nowhere"), "./nowhere: no such folder"),
    (("--config", "llama-1m:max_position_embeddings=64", "--block-length", "65"),
        "--block-length 65 is beyond the model's 64 positions"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [*(("retrofit", *row) for row in RETROFIT_REFUSALS), *(("train", *row) for row in TRAIN_REFUSALS)],
)
def test_refusals_write_nothing(command: str, options: tuple[str, ...], message: str, tiny: Path) -> None:
    Path("../short.txt").write_text("the drain " * 10)
    Path("../taken").mkdir()
    Path("../taken/thesis.tex").touch()
    T5Config().to_json_file("../t5.json")
    Path("../half.json").write_text('{"model_type": "llama"')
    Path("../nothing.json").write_text("{}")
    model = (tiny,) if command == "retrofit" else ()
    assert refused(2, command, *model, "--out", "out", *options).startswith(f"sinkscope: {message}")


@pytest.mark.usefixtures("no_figures")
def test_a_retrofitted_model_is_fine_tuned_with_what_is_in_it(text: Path) -> None:
    before = retrofit_model(tiny_model("llama"), None, "iga")
    before.save_pretrained("iga")
    words_tokenizer().save_pretrained("iga")
    with pytest.raises(InputError, match="has been retrofitted with iga already: apply vga to the model it was made"):
        retrofit("iga", "vga", text=text, out="out", **SMALL)
    done = retrofit("iga", "none", text=text, out="out", **SMALL)
    after = AutoModelForCausalLM.from_pretrained(done.model("none"))
    assert after.config.retrofit["method"] == "iga"
    moved = {name for name, weight in after.state_dict().items() if not torch.equal(weight, before.state_dict()[name])}
    assert set(new_parameters(after)) <= moved
    assert any("embed_tokens" in name for name in moved)


@pytest.fixture(scope="session")
def unbroken(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete retrofit of one arm, without figures. Tests must not change it."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        retrofit(str(tiny), "vga", text=text, out=out, **SMALL)
    return out


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_in_rust(*args: Any, **options: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_full_disk_at_any_stage_says_so_and_loses_nothing(
    tiny: Path, text: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is repeated, and each time the disk is full at a later stage."""
    steps: list[int] = []
    step = Trainer.training_step
    monkeypatch.setattr(
        Trainer, "training_step", lambda self, *inputs: (steps.append(self.state.global_step), step(self, *inputs))[1]
    )
    arguments = ("retrofit", tiny, "--method", "vga", "--text", text, *TYPED, "--out", tmp_path / "out")
    stages: list[tuple[Any, str, Any, str]] = [
        (sinkscope.commands.train.arms.np, "save", full, "nothing of it is left"),  # the held-out blocks
        (sinkscope.output.result, "write_tables", full, "untouched/run failed"),
        (Trainer, "_save_rng_state", full, "what was reached is kept"),  # a checkpoint
        (sinkscope.commands.train.arms, "write_tables", full, "the training up to step 3 is kept"),
        (PreTrainedModel, "save_pretrained", full_in_rust, "the training up to step 3 is kept"),
        (sinkscope.commands.train.arms, "write_data", full, "vga/run failed"),
        (sinkscope.output.result, "save_figures", full, "figures failed, and nothing of it is left"),
    ]
    for place, name, fails, told in stages:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fails)
            result = command_line(*arguments)
        assert result.exit_code == 1, result.output
        assert result.stderr.splitlines()[-1].startswith("sinkscope: "), result.stderr
        assert "No space left on device" in result.stderr
        assert told in result.stderr, (told, result.stderr)
        assert not list((tmp_path / "out").rglob(".sinkscope-*"))
    result = succeeded(*arguments)
    assert steps == [0, 1, 2] * 2  # steps are repeated only without a checkpoint
    resumed, whole = (json.loads((out / "run.json").read_text())["arms"] for out in (tmp_path / "out", unbroken))
    assert resumed["vga"]["step_seconds"] is None  # unknown
    assert whole["vga"]["step_seconds"] > 0
    folders = [folder / "vga" for folder in (tmp_path / "out", unbroken)]
    assert len({(folder / "model" / "model.safetensors").read_bytes() for folder in folders}) == 1
    assert len({Run.open(folder / "run").metric("loss") for folder in folders}) == 1


def test_other_options_weights_and_methods_are_refused(tiny: Path, text: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    told = refused(2, "retrofit", tiny, "--text", text, *TYPED, "--learning-rate", "0.1", "--out", out)
    assert "made with other options (learning_rate was 5e-05, now 0.1): repeat them to resume it" in told
    for other in ("iga", "vga:placement=output"):
        with pytest.raises(InputError, match="its vga is another method"):
            retrofit(str(tiny), {"vga": other}, text=text, out=out, **SMALL)
    own = Path(shutil.copytree(tiny, tmp_path / "own"))
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[1, 1] += 1
    model.save_pretrained(own)
    (out / "run.json").write_text((out / "run.json").read_text().replace(str(tiny), str(own)))
    with pytest.raises(InputError, match=r"made with other options \(weights_sha256 was \w+…, now \w+…\)"):
        retrofit(str(own), "vga,none", text=text, out=out, **SMALL)


def test_methods_as_they_are_typed() -> None:
    vga = {"placement": "output", "scale": "1"}
    expected = {"vga-placement=output-scale=1": ("vga", vga), "none": ("none", {})}
    assert parse_methods("vga:placement=output,scale=1,none") == expected
    several = parse_methods(["vga", "register-tokens:count=2"])
    assert list(several.values()) == [("vga", {}), ("register-tokens", {"count": "2"})]
    assert parse_methods({"VGA": "vga:scale=1"}) == {"VGA": ("vga", {"scale": "1"})}
    for wrong in ("", "placement=output", {"a/b": "vga"}, {"untouched": "vga"}, {"both": "vga,iga"}):
        with pytest.raises(InputError):
            parse_methods(wrong)
