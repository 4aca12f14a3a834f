"""`benchmark`: scores equal those computed with plain transformers, and a sweep shows them next to sink rates."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.retrofit_command import WORDS, words_tokenizer

import sinkscope
from sinkscope.commands.benchmark.command import _evaluated, scores_table
from sinkscope.commands.benchmark.options import BenchmarkOptions
from sinkscope.errors import InputError
from sinkscope.results.scores import SCORE_COLUMNS, main_scores
from sinkscope.results.tables import LEADING, names_of, read_table

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is an optional package"
)
QUESTIONS: list[dict[str, Any]] = [
    {"asked": " ".join(WORDS[4 + (n + step) % 4] for step in range(3)), "choices": ["the", "drain of"], "right": n % 2}
    for n in range(6)
]
TASK = """
task: drains
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{asked}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 2.0}}
"""
# as the harness returns it: a group, its two tasks, and a task outside the group
RESULTS: dict[str, Any] = {
    "results": {
        "both": {"alias": "both", "acc,none": 0.5, "acc_stderr,none": 0.1},
        "one": {"alias": " - one", "acc,none": 0.25, "acc_stderr,none": 0.2, "acc_norm,none": 0.75},
        "two": {"alias": " - two", "acc,none": 0.75, "acc_stderr,none": "N/A"},
        "other": {"alias": "other", "bleu,none": 3.0, "exact_match,strict": 0.1, "exact_match,flexible": 0.2,
                  "exact_match_stderr,strict": 0.03},
    },
    "groups": {"both": {"alias": "both", "acc,none": 0.5, "acc_stderr,none": 0.1}},
    "group_subtasks": {"both": ["one", "two"], "other": []},
    "n-shot": {"one": 0, "two": 5, "other": 2},
    "versions": {"one": 1.0, "two": 2, "other": "Yaml"},
    "n-samples": {"one": {"original": 9, "effective": 4}, "two": {"effective": 4}, "other": {"effective": 2}},
}  # fmt: skip


def test_the_table_has_every_score_of_the_harness() -> None:
    table = scores_table(RESULTS, "m", ("both", "other"))
    assert list(table.columns) == [*LEADING, *names_of(SCORE_COLUMNS)]
    rows = table.set_index(["condition", "metric", "filter"])
    assert rows["score"].to_dict() == {
        ("both", "acc", "none"): 0.5, ("one", "acc", "none"): 0.25, ("one", "acc_norm", "none"): 0.75,
        ("two", "acc", "none"): 0.75, ("other", "bleu", "none"): 3.0, ("other", "exact_match", "strict"): 0.1,
        ("other", "exact_match", "flexible"): 0.2,
    }  # fmt: skip
    assert rows["error"].tolist()[:2] == [0.1, 0.2]
    assert rows.loc[("other", "exact_match", "strict"), "error"] == 0.03
    assert rows["error"].isna().sum() == 4
    assert rows["questions"].tolist() == [0, 4, 4, 4, 2, 2, 2]
    assert rows["shots"].tolist() == [-1, 0, 0, 5, 2, 2, 2]
    assert table["is_asked"].tolist() == [True, False, False, False, True, True, True]
    of_tag = scores_table(RESULTS, "m", ("both", "tag of other"))
    assert of_tag["is_asked"].tolist() == [True, False, False, False, True, True, True]
    nested = RESULTS | {"group_subtasks": {"all": ["both"], "both": ["one", "two"]}}
    of_nested = scores_table(nested, "m", ("all", "tag of other"))
    assert of_nested["is_asked"].tolist() == [False, False, False, False, True, True, True]
    main = main_scores(table)
    assert main[["condition", "metric", "filter"]].to_numpy().tolist() == [
        ["both", "acc", "none"], ["other", "exact_match", "strict"],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "drains.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "drains.yaml").write_text(TASK.format(data=folder / "drains.jsonl"))
    return folder


@torch.no_grad()
def accuracy(model: Path) -> float:
    """Return the share of questions whose right answer has the largest probability under plain transformers."""
    network, tokenizer = sinkscope.load(str(model)).model, words_tokenizer()
    right = []
    for question in QUESTIONS:
        sums = []
        for choice in question["choices"]:
            before = tokenizer(question["asked"]).input_ids
            ids = tokenizer(f"{question['asked']} {choice}").input_ids
            logits = network(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(float(logits[at - 1, ids[at]]) for at in range(len(before), len(ids))))
        right.append(int(np.argmax(sums)) == question["right"])
    return float(np.mean(right))


@needs_harness
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_score_is_what_plain_transformers_give(name: str, models: Path, tasks: Path, tmp_path: Path) -> None:
    random.seed(5)
    before = random.getstate()
    scores = sinkscope.benchmark(models / name, tasks="drains", task_path=str(tasks), out=tmp_path / "out")
    assert random.getstate() == before
    by_metric = scores.table.set_index("metric")
    assert by_metric["score"]["acc"] == pytest.approx(accuracy(models / name))
    assert by_metric["questions"]["acc"] == len(QUESTIONS)
    assert by_metric["version"]["acc"] == "2.0"
    assert scores.main[["condition", "metric"]].to_numpy().tolist() == [["drains", "acc_norm"]]
    pd.testing.assert_frame_equal(read_table(tmp_path / "out" / "tables" / "benchmark.parquet"), scores.table)
    with pytest.raises(InputError, match="has no task 'drain'"):
        sinkscope.benchmark(models / name, tasks="drains,drain", task_path=str(tasks))
    some = sinkscope.benchmark(models / name, tasks="drains", task_path=str(tasks), limit=2)
    assert set(some.table["questions"]) == {2}


@pytest.mark.parametrize("shots", [None, 0, 3])
def test_the_harness_is_asked_for_the_shots_that_are_named(shots: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no task's default. The harness, which seeds all generators, is replaced: it may not be installed."""
    asked: dict[str, Any] = {}

    def evaluate(**named: Any) -> dict[str, Any]:
        asked.update(named)
        np.random.seed(0)  # noqa: NPY002
        return {}

    harness: dict[str, Any] = {
        "lm_eval": {"simple_evaluate": evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda **named: None},
    }
    for name, content in harness.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    loaded: Any = SimpleNamespace(model=None, tokenizer=object(), name="m")
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()  # noqa: NPY002
    _evaluated(loaded, BenchmarkOptions(model="m", shots=shots, seed=7), None)
    np.testing.assert_equal(np.random.get_state(), before)  # noqa: NPY002
    assert asked["num_fewshot"] == shots
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    assert {asked.get(kind) for kind in kinds} == {7}
