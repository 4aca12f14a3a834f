"""The sweeps of trainings that come with sinkscope, and their small forms: every cell can be trained."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from support.naming import naming

from sinkscope.commands.train import check
from sinkscope.errors import InputError
from sinkscope.options.sweep_file import Cell, read_sweep
from sinkscope.retrofits.register_tokens import RegisterTokens
from sinkscope.training.architectures import architecture
from sinkscope.training.arms import parse_methods
from sinkscope.training.tasks import TASKS

STUDIES = sorted(path.stem for path in Path(__file__).parents[2].glob("recipes/sweeps/when-sinks-emerge-*.yaml"))
STUDIES.remove("when-sinks-emerge-table-1")  # a sweep of pretrained models


EVERYWHERE = {"attention", "activation", "massive", "gradient"}  # observables that apply to every model here
OF_WINDOWS = {"window-edge"}  # and observables that apply to models with a sliding window


def test_every_cell_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.commands.train.check_text", lambda text: None)  # the corpus may be missing
    for name, quick in product(STUDIES, (False, True)):
        with naming(name, quick):
            sweep = read_sweep(name, {}, quick)
            assert len({cell.name for cell in sweep.cells}) == len(sweep.cells)
            for cell in sweep.cells:
                options = cell.options
                check(options)
                windowed = getattr(architecture(options.config), "sliding_window", None) is not None
                # an observable that does not apply to a model fails its cell
                assert set(options.observables) <= (EVERYWHERE | OF_WINDOWS if windowed else EVERYWHERE)
                assert "gradient" in options.observables  # it measures the loss that claims compare
                registers = any(method.name == RegisterTokens.name for method in parse_methods(options.method))
                assert options.block_length + registers <= architecture(options.config).max_position_embeddings
                assert options.text in TASKS or options.text == ".models/corpus.jsonl"


def test_the_small_form_is_smaller() -> None:
    def steps(cells: Iterable[Cell]) -> int:
        return sum(each.options.steps * each.options.seeds * len(parse_methods(each.options.method)) for each in cells)

    for name in STUDIES:
        whole, small = (read_sweep(name, {}, quick).cells for quick in (False, True))
        assert steps(small) < steps(whole) / 5
        told = {cell.setting: cell.options.config for cell in whole}
        assert {cell.setting: cell.options.config for cell in small}.items() <= told.items()
    whole, small = (read_sweep("when-sinks-emerge-text-operations", {}, quick).cells for quick in (False, True))
    assert [cell.setting for cell in whole if ",seed=0" in cell.setting] == [cell.setting for cell in small]
    with pytest.raises(InputError, match="occurs twice"):
        read_sweep("when-sinks-emerge-text-operations", {"seed": 0})
    with pytest.raises(InputError, match="it has no small form for --quick"):
        read_sweep("offline-models", {}, quick=True)


def test_methods_as_a_setting_are_called_as_they_are_labeled() -> None:
    cells = read_sweep("when-sinks-emerge-text-operations", {}).cells
    assert [cell.setting for cell in cells[2:4]] == ["method=none,seed=2", "method=sigmoid,seed=0"]
    assert all(parse_methods(cell.options.method)[0].label == cell.setting.split(",")[0][7:] for cell in cells)
    plain = [cell for cell in read_sweep("when-sinks-emerge-text-data", {}).cells if cell.options.tokens == 10240000]
    assert [cell.config for cell in plain] == [cell.config for cell in cells[:3]]  # as the recipe says
