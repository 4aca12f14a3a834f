"""`SinkCallback`: training does not notice it, it measures what `analyze` measures, and its curves can be read."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from support.encoders import word_tokenizer
from support.ranks import COUNT, on_two_ranks, shard_on_cpu, sharding_environment
from support.retrofit_command import succeeded
from tiny import tiny_model, tiny_tokens, written
from torch.utils.data import Dataset, IterableDataset, Subset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import sinkscope
from sinkscope.errors import InputError
from sinkscope.measuring.callback import HEADROOMS, LOGGED, ONSETS
from sinkscope.results.metrics import METRICS

LENGTH, STEPS = 16, 200
IDS = tiny_tokens(40, LENGTH)
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]
TRAINED, HELD_OUT = ROWS[:32], ROWS[32:]


def trainer(
    folder: Path, *callbacks: Any, steps: int = STEPS, model: PreTrainedModel | None = None, **options: Any
) -> Trainer:
    model = model or tiny_model("llama")
    model.config.attention_dropout = 0.1
    model.requires_grad_(True)
    defaults = {"max_steps": steps, "per_device_train_batch_size": 4, "save_steps": 100, "logging_steps": 50}
    defaults |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 3e-3}
    arguments = TrainingArguments(str(folder), **defaults | options)
    return Trainer(model, arguments, train_dataset=TRAINED, eval_dataset=HELD_OUT, callbacks=list(callbacks))


def trained(
    folder: Path, *callbacks: Any, dataset: Any = TRAINED, held_out: Any = HELD_OUT, **options: Any
) -> tuple[Trainer, list[Any], list[torch.Tensor]]:
    """Train, and return the Trainer, the random numbers at the end, and all numbers of model and optimizer."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    done = trainer(folder, *callbacks, **options)
    done.train_dataset, done.eval_dataset = dataset, held_out
    done.train()
    moments = [x for state in done.optimizer.state_dict()["state"].values() for x in state.values()]
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    return done, numbers, [*done.model.state_dict().values(), *moments]


def assert_same_training(first: tuple[Trainer, Any, list], second: tuple[Trainer, Any, list]) -> None:
    assert first[1] == second[1]
    assert len(first[2]) == len(second[2]) > 0
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
    assert [m.training for m in first[0].model.modules()] == [m.training for m in second[0].model.modules()]


def curves(folder: Path) -> pd.DataFrame:
    """Return the metrics of the whole model: a row for each step."""
    table = pd.read_parquet(folder / "sinks" / "tables" / "training.parquet").query("layer == -1")
    return table.pivot(index="step", columns="metric", values="value")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, list]:
    """Train 200 steps with and without the callback."""
    folder, onsets = tmp_path_factory.mktemp("callback"), list[Any]()
    callback = sinkscope.SinkCallback(every=50, seq_len=LENGTH, on_onset=onsets.append)
    plain = trained(folder / "plain")
    measured = trained(folder / "measured", callback, report_to=["tensorboard"])
    return folder, plain, measured, onsets


@pytest.mark.slow
def test_200_steps_are_the_same_bit_for_bit_with_and_without_it(both: Any) -> None:
    assert_same_training(both[1], both[2])


@pytest.mark.slow
def test_it_measures_what_analyze_measures_on_the_checkpoints(both: Any, tmp_path: Path) -> None:
    folder = both[0] / "measured"
    course, ids = curves(folder), written(tmp_path / "ids.jsonl", [row["input_ids"] for row in HELD_OUT])
    assert list(course.index) == [0, 50, 100, 150, 200]
    names = ("attention", "geometry", "massive", "outlier", "largest-logit")
    for step in (100, 200):
        run = sinkscope.analyze(folder / f"checkpoint-{step}", input=ids, seq_len=LENGTH, observables=names)
        summary = run.tables["summary"].query("layer == -1").set_index("metric")["value"]
        np.testing.assert_allclose(course.loc[step, summary.index], summary, rtol=1e-5, atol=1e-7)
        massive = run.tables["massive"]
        row = massive.loc[massive["value"].abs().idxmax()]
        kept = pd.read_parquet(folder / "sinks/tables/largest_activations.parquet").set_index("step").loc[step]
        assert [kept[name] for name in ("layer", "coordinate", "position", "token_id")] == [
            row[name] for name in ("layer", "coordinate", "position", "token_id")
        ]
        assert course["float16_headroom"][step] == pytest.approx(65504 / abs(row["value"]), rel=1e-5)
        assert course["float8_headroom"][step] == pytest.approx(448 / abs(row["value"]), rel=1e-5)
        logits = pd.read_parquet(folder / "sinks/tables/largest_logits.parquet").query("step == @step")
        np.testing.assert_allclose(logits["largest"], run.tables["largest_logit"]["largest"], rtol=1e-5)


def test_the_largest_logit_is_that_of_plain_attention() -> None:
    model = tiny_model("gpt2")
    layers = [sequence.layers[0] for sequence in reference.record_each(model, IDS)]
    expected = np.max([np.where(layer.allowed, np.abs(layer.logits), 0.0).max((1, 2)) for layer in layers], axis=0)
    with sinkscope.watch(model, observables="largest-logit") as watched:
        model(IDS)
    largest = watched.tables["largest_logit"].query("layer == 0")["largest"]
    np.testing.assert_allclose(largest, expected, rtol=1e-5)


def test_tensorboards_event_file_has_the_curves(both: Any) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = (both[0] / "measured").rglob("events.out.*")
    events = accumulator.EventAccumulator(str(file)).Reload()
    course = curves(both[0] / "measured")
    for name in ("sink_rate", "largest_activation", "kurtosis", "value_drain", "largest_logit", "float8_headroom"):
        scalars = events.Scalars(f"train/sinks/{name}")
        assert [scalar.step for scalar in scalars] == list(course.index)
        np.testing.assert_allclose([scalar.value for scalar in scalars], course[name], rtol=1e-6)
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [50, 100, 150, 200]
    names = {name.removeprefix("train/sinks/") for name in events.Tags()["scalars"] if "sinks/" in name}
    assert names <= {*LOGGED, *HEADROOMS, *(f"onset_{metric}" for metric in ONSETS)}  # no coordinates or token ids


def test_show_and_compare_open_the_curves(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = both[0] / "measured" / "sinks"
    assert "largest_activations" in sinkscope.show(folder).read_text()
    assert set(curves(both[0] / "measured")) <= METRICS.keys()
    with pytest.raises(InputError, match=r"is of SinkCallback: `sinkscope.compare\('.*'\).by_step` has its curves"):
        sinkscope.Run.open(folder)
    succeeded("compare", str(folder), "--out", str(tmp_path / "alone"))
    assert (tmp_path / "alone" / "figures" / "training-curves.pdf").is_file()
    again = shutil.copytree(folder, tmp_path / "again" / "sinks")
    compared = sinkscope.compare(folder, again, out=tmp_path / "both", page=False)
    assert list(compared.by_step.loc["again"].index) == [0, 50, 100, 150, 200]
    assert (compared.by_step.loc["again"] == compared.by_step.loc["measured"]).all(axis=None)
    assert (tmp_path / "both" / "figures" / "training-curves.png").is_file()
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    assert set(sinkscope.compare(folder, renamed).by_step.index.levels[0]) == {"measured", "renamed"}
    monkeypatch.chdir(folder.parent)
    assert set(sinkscope.compare("sinks", renamed).by_step.index.levels[0]) == {"measured", "renamed"}


class At(TrainerCallback):
    """Does something at the end of one step."""

    def __init__(self, step: int, do: Callable[[Any], object]) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.do(control)


@pytest.mark.slow
def test_a_resumed_training_goes_on_with_its_curve(both: Any, tmp_path: Path) -> None:
    stopping = At(150, lambda control: setattr(control, "should_training_stop", True))
    trained(tmp_path, sinkscope.SinkCallback(every=50, seq_len=LENGTH), stopping)
    assert list(curves(tmp_path).index) == [0, 50, 100, 150]
    # from checkpoint-100, before the last measured step
    resumed = trainer(tmp_path, sinkscope.SinkCallback(every=50, seq_len=LENGTH))
    resumed.train(resume_from_checkpoint=True)
    pd.testing.assert_frame_equal(curves(tmp_path), curves(both[0] / "measured"), rtol=1e-5)


def test_a_measurement_is_one_forward_pass_over_its_texts(tmp_path: Path) -> None:
    """32 × 64 tokens every 100 steps of 8 × 512, whose backward pass costs two forward passes, are then 0.17 %."""
    model, read = tiny_model("llama"), dict[bool, int]()
    embedding = model.get_input_embeddings()

    def count(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        read[module.training] = read.get(module.training, 0) + args[0].numel()

    with embedding.register_forward_hook(count):
        trainer(tmp_path, sinkscope.SinkCallback(every=2, seq_len=LENGTH), model=model, steps=5).train()
    assert read == {True: 5 * 4 * LENGTH, False: 4 * len(HELD_OUT) * LENGTH}
    assert list(curves(tmp_path).index) == [0, 2, 4, 5]  # the last step, too
    assert 32 * 64 / (100 * 3 * 8 * 512) < 0.01


WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_training_notices_it(way: str, tmp_path: Path) -> None:
    def partly_in_eval_mode() -> PreTrainedModel:
        model = tiny_model("llama")
        model.train().model.layers[1].train(False)
        return model

    ours = sinkscope.SinkCallback(every=2, seq_len=LENGTH)
    plain, measured = (
        trained(tmp_path / str(len(callbacks)), *callbacks, steps=6, model=partly_in_eval_mode(), **WAYS[way])
        for callbacks in ([], [ours])
    )
    assert_same_training(plain, measured)
    assert list(curves(tmp_path / "1").index) == [0, 2, 4, 6]


def test_on_onset_is_called_once_when_a_sink_and_when_massive_activations_begin(tmp_path: Path) -> None:
    model, onsets = tiny_model("gpt2"), list[Any]()
    blocks = model.transformer.h

    @torch.no_grad()
    def attend_uniformly() -> None:
        for block in blocks:
            block.attn.c_attn.weight[:, :32] = block.attn.c_attn.bias[:32] = 0.0

    @torch.no_grad()
    def attend_to_the_first(_: Any) -> None:
        model.transformer.wpe.weight[0, 0] += 50.0
        blocks[0].attn.c_attn.bias[:32] = blocks[0].attn.c_attn.weight[0, 32:64] = 5.0

    @torch.no_grad()
    def become_massive(_: Any) -> None:
        blocks[1].mlp.c_proj.bias[3] = 1e5

    attend_uniformly()
    changes = At(2, attend_to_the_first), At(5, become_massive)
    callback = sinkscope.SinkCallback(every=3, seq_len=LENGTH, on_onset=onsets.append)
    done = trainer(tmp_path, *changes, callback, model=model, steps=9, learning_rate=0.0)
    done.train()
    assert [(onset.metric, onset.step) for onset in onsets] == [("sink_rate", 3), ("massive_share", 6)]
    logged = {logs["step"]: {key: logs[key] for key in logs if "onset" in key} for logs in done.state.log_history}
    assert logged | {9: {}} == {0: {}, 3: {"sinks/onset_sink_rate": 3.0}, 6: {"sinks/onset_massive_share": 6.0}, 9: {}}
    pd.testing.assert_frame_equal(callback.curves, curves(tmp_path))
    largest = pd.read_parquet(tmp_path / "sinks/tables/largest_activations.parquet").query("step == 6").iloc[0]
    assert (largest["layer"], largest["coordinate"]) in ((1, 3), (2, 3))


@pytest.mark.parametrize(
    ("metric", "read", "below", "there"),
    [("sink_rate", "sink_rate_clear", 0.1, 0.101), ("massive_share", "massive_share", 0.499, 0.5)],
)
def test_onsets_have_the_thresholds_of_the_verdict(metric: str, read: str, below: float, there: float) -> None:
    _, is_there = ONSETS[metric]
    assert [is_there({read: value}) for value in (below, there)] == [False, True]


def test_it_logs_the_layer_with_most_massive_activations_and_the_largest_logit_of_all_heads(tmp_path: Path) -> None:
    """In the first layer all texts have a massive activation, from the second on those with one token."""
    model = tiny_model("gpt2")
    token = int(HELD_OUT[0]["input_ids"][3])
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[3], model.transformer.h[1].mlp.c_proj.bias[3] = 1e5, -1e5
        model.transformer.wte.weight[token, 5] = 1e6
    done = trainer(tmp_path, sinkscope.SinkCallback(seq_len=LENGTH), model=model, steps=1, learning_rate=0.0)
    done.train()
    logged = next(logs for logs in done.state.log_history if "sinks/massive_share" in logs)
    assert logged["sinks/massive_share"] == 1.0
    logits = pd.read_parquet(tmp_path / "sinks/tables/largest_logits.parquet").query("step == 0")
    assert logged["sinks/largest_logit"] == pytest.approx(logits["largest"].max())
    assert any(token not in text["input_ids"] for text in HELD_OUT)


def test_texts_of_several_kinds_and_what_cannot_be_measured(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    texts: list[Any] = ["w5 w6 w7 w8 w9", {"text": "w5 w6 w7"}, {"input_ids": [7, 8, 9]}, torch.tensor([4, 5])]
    done = trainer(tmp_path / "texts", sinkscope.SinkCallback(texts=texts), steps=1)
    done.callback_handler.processing_class = tokenizer
    with pytest.warns(UserWarning, match="logs no sink rate of position 0: uniform attention alone gives it"):
        done.train()
    assert curves(tmp_path / "texts")["sink_rate"].isna().all()  # of 5 tokens and fewer
    assert curves(tmp_path / "texts")["window_mass"].notna().all()
    for number, (wrong_texts, message) in enumerate(
        (([3.5, "x"], "needs a tokenizer"), ([[500, 501]], "outside the model"))
    ):
        with pytest.warns(UserWarning, match=f"measures nothing: .*{message}"):
            trainer(tmp_path / str(number), sinkscope.SinkCallback(texts=wrong_texts[-1:]), steps=1).train()
    with pytest.raises(InputError, match="every=0"):
        sinkscope.SinkCallback(every=0)


class Drawing(Dataset):
    """Rows that draw from all global generators and from its own, which a wrapper holds, whenever they are read."""

    def __init__(self) -> None:
        self.parts = [np.random.default_rng(0), torch.Generator().manual_seed(0), {"own": random.Random(0)}]

    def __len__(self) -> int:
        return len(TRAINED)

    def __getitem__(self, row: int) -> dict[str, Any]:
        numpy, own, held = self.parts
        drawn = random.random() + np.random.rand() + float(torch.rand(())) + numpy.random() + held["own"].random()  # noqa: NPY002
        first = (int(1000 * (drawn + float(torch.rand((), generator=own)))) + row) % 40
        ids = torch.cat([torch.tensor([first]), TRAINED[row]["input_ids"][1:]])
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("place", ["train", "eval", "texts"])
def test_reading_a_dataset_that_draws_changes_nothing(place: str, tmp_path: Path) -> None:
    plain, measured = (Subset(Drawing(), range(32)) for _ in range(2))
    expected = trained(tmp_path / "plain", dataset=plain, held_out=None, steps=4)
    callback = sinkscope.SinkCallback(every=2, seq_len=LENGTH, texts=measured if place == "texts" else None)
    held_out = measured if place == "eval" else None
    measured_training = trained(tmp_path / "measured", callback, dataset=measured, held_out=held_out, steps=4)
    assert_same_training(expected, measured_training)
    states = [
        [one.dataset.parts[0].random(), float(torch.rand((), generator=one.dataset.parts[1])),
         one.dataset.parts[2]["own"].random()] for one in (plain, measured)
    ]  # fmt: skip
    assert states[0] == states[1]
    assert list(curves(tmp_path / "measured").index) == [0, 2, 4]


def test_without_evaluation_texts_it_measures_the_training_texts_and_says_so(tmp_path: Path) -> None:
    """Packed rows as their sequences, and an iterator of texts, which can be read only once, not at all."""
    ids = torch.tensor([1, *range(5, 5 + LENGTH - 1)])
    rows = [{"input_ids": ids, "labels": ids, "seq_lengths": [10, 6]}, *TRAINED[:3]]
    callback = sinkscope.SinkCallback(seq_len=LENGTH, num_seqs=3)
    trained(tmp_path / "rows", callback, dataset=rows, held_out=None, steps=1)
    manifest = json.loads((tmp_path / "rows" / "sinks" / "run.json").read_text(encoding="utf-8"))
    read = manifest["input"]
    assert (manifest["condition"], read["sequences"], read["shortest"], read["longest"]) == ("training-set", 3, 6, 16)
    assert read["read"].startswith("training set: token-ids, 3 sequences, the first begins `1, 5, 6, 7")
    assert read["token_zero"] == "varies"
    texts = [{"input_ids": ids[:10]}, {"input_ids": ids[10:]}, TRAINED[0]]
    model = tiny_model("llama")
    run = sinkscope.analyze(model, input=texts, observables=("attention", "massive"))
    assert read["sha256"] == run.manifest["input"]["sha256"]
    assert curves(tmp_path / "rows")["sink_rate"][0] == pytest.approx(run.metric("sink_rate"))

    class Once(IterableDataset):
        def __init__(self) -> None:
            self.rows = iter(TRAINED)

        def __iter__(self) -> Any:
            return (row for row in self.rows)

        def __len__(self) -> int:  # also then it cannot be indexed
            return len(TRAINED)

    class Streamed(Once):
        def __init__(self) -> None:
            self.rows = (row for row in TRAINED)

    options = {"held_out": None, "steps": 4}
    expected = trained(tmp_path / "plain", dataset=Once(), **options)
    measured = trained(tmp_path / "once", sinkscope.SinkCallback(seq_len=LENGTH), dataset=Once(), **options)
    assert_same_training(expected, measured)
    assert curves(tmp_path / "once")["sink_rate"].notna().all()
    with pytest.warns(UserWarning, match="read only once"):
        measured = trained(tmp_path / "streamed", sinkscope.SinkCallback(seq_len=LENGTH), dataset=Streamed(), **options)
    assert_same_training(expected, measured)


def test_two_processes_train_as_without_it_and_the_first_measures(tmp_path: Path) -> None:
    def work() -> None:
        for name, callbacks in (("plain", []), ("measured", [sinkscope.SinkCallback(every=2, seq_len=LENGTH)])):
            _, numbers, tensors = trained(tmp_path / name, *callbacks, steps=6)
            torch.save([numbers, tensors], tmp_path / f"{name}-{os.environ['RANK']}.pt")

    assert on_two_ranks(work, tmp_path / "log") == [0] * COUNT, (tmp_path / "log").read_text()
    for rank in range(COUNT):
        plain, measured = (
            torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for name in ("plain", "measured")
        )
        assert plain[0] == measured[0]
        assert all(torch.equal(a, b) for a, b in zip(plain[1], measured[1], strict=True))
    assert list(curves(tmp_path / "measured").index) == [0, 2, 4, 6]


def test_a_sharded_model_is_not_measured_and_a_warning_says_so(tmp_path: Path) -> None:
    def work() -> None:
        shard_on_cpu()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(tmp_path / "sharded", sinkscope.SinkCallback(seq_len=LENGTH), steps=2, save_strategy="no").train()
        print(*(warning.message for warning in caught))

    ended = on_two_ranks(work, tmp_path / "log", **sharding_environment())
    assert ended == [0] * COUNT, (tmp_path / "log").read_text()
    assert "SinkCallback measures nothing: the weights of this model are sharded" in (tmp_path / "log").read_text()
