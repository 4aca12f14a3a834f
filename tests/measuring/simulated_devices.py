"""What would break on a GPU breaks on the simulated devices: tables there are those of the CPU.

test_simulated.py runs these tests, and tests/gpu.sh runs them on a GPU.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from attention.test_kernels import CALLS, ERRORS, LENGTHS, check_kernels, check_outcome
from support.accelerators import IS_REAL, NAME, PLACES, counting, moved, simulated
from support.counted_commands import COUNTED_COMMANDS
from support.retrofitted import FURTHER, METHODS
from tiny import FORWARD, REPRESENTATIVE, TINY, batched, measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

import sinkscope
from sinkscope.attention import kernels
from sinkscope.commands.doctor import kernels as compared_kernels
from sinkscope.commands.sweep import pools
from sinkscope.errors import SinkscopeError
from sinkscope.interventions import parse
from sinkscope.measuring import tracer
from sinkscope.measuring.memory import USABLE, bytes_per_token
from sinkscope.measuring.observables import OBSERVABLES, gradient, massive
from sinkscope.measuring.observables.observable import Settings, copied_entries
from sinkscope.measuring.observables.reductions import GROUPS
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import find_family
from sinkscope.retrofits import new_parameters, retrofit_model
from sinkscope.text.batch import on_cpu

OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 20, "positions": 8}
SETTINGS = Settings(positions=8, window=16)
# A device rounds sums in another order. What one rounding of the input does to a table on the CPU (`one_ulp`) is
# therefore the measure of what a device may do to it: at most MARGIN times that, or LEAST where it does nothing.
MARGIN, LEAST = 8.0, 1e-5  # LEAST is relative to the largest number of a column, as all differences are
needs_simulation = pytest.mark.skipif(IS_REAL, reason="changes what the simulated device has")
ROUND_OFF = {"identity_residual", "value"}  # columns that are nothing else, or the sign of the largest of near equals


def furthest(here: dict[str, pd.DataFrame], there: dict[str, pd.DataFrame]) -> dict[str, float]:
    """Return the largest difference of each column's means over sequences, relative to its largest number.

    A table whose number of rows differs, such as that of sinks, is infinitely far as a whole.
    """
    assert here.keys() == there.keys()
    differences = {}
    for table, own in here.items():
        if own.shape != there[table].shape:
            differences[table] = math.inf
            continue
        for name in own.select_dtypes("float").columns.difference(ROUND_OFF):
            both = own[name].to_numpy(float), there[table][name].to_numpy(float)
            known = np.isfinite(both[0]) & np.isfinite(both[1])
            if known.any():
                difference = np.abs(both[0] - both[1])[known].max()
                differences[f"{table}.{name}"] = float(difference / max(np.abs(both[0][known]).max(), 1e-12))
    return differences


def far(here: dict[str, pd.DataFrame], there: dict[str, pd.DataFrame], tolerance: float) -> dict[str, float]:
    return {name: difference for name, difference in furthest(here, there).items() if difference > tolerance}


# Each kind of family in both dtypes, in half precision also with padding; one of the two on several devices, where
# tensors meet those of the CPU and of the other device.
CASES = [
    (name, min(places, PLACES), dtype)
    for at, name in enumerate(REPRESENTATIVE)
    for places, dtype in zip((2, 1), (torch.bfloat16, torch.float32)[:: 1 - at % 2 * 2], strict=True)
]
SPREAD = {torch.bfloat16: 2.0, torch.float32: 12.0}


def observed(model: PreTrainedModel) -> dict[str, pd.DataFrame]:
    lengths = (20, 13, 17) if model.dtype == torch.bfloat16 else (20, 20)
    return measured(model, [padded(ragged_tokens(lengths))], SETTINGS, (*FORWARD, "gradient"), backward=True)


def one_ulp(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Move every number of the embeddings to the next one of its dtype, up or down at random."""
    weight = model.get_input_embeddings().weight
    up = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    weight.data = torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype))
    return model


def further_than_rounding(name: str, places: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return the columns that differ on a device by more than is allowed: by how much, and what is allowed."""

    def model() -> PreTrainedModel:
        return tiny_model(name, dtype=dtype, spread=SPREAD[dtype])

    here = observed(model())
    rounded = furthest(here, observed(one_ulp(model())))
    with simulated():
        there = furthest(here, observed(moved(model(), places)))
    # where rounding changes the number of a table's rows, nothing follows from its columns
    unstable = {column for column in there if column.partition(".")[0] in rounded}
    allowed = {
        column: math.inf if column in unstable else max(LEAST, MARGIN * rounded.get(column, 0.0)) for column in there
    }
    return {column: (far, allowed[column]) for column, far in there.items() if not far <= allowed[column]}


@pytest.mark.parametrize(("name", "places", "dtype"), CASES)
def test_observables(name: str, places: int, dtype: torch.dtype) -> None:
    assert further_than_rounding(name, places, dtype) == {}


def rescaled(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply the scale of the logits in the device's fused kernels."""
    plain = kernels._run_kernel

    def scaled(kernel: str, query: torch.Tensor, *arguments: Any) -> Any:
        *others, scaling = arguments
        return plain(kernel, query, *others, scaling if query.device.type == "cpu" else factor * scaling)

    monkeypatch.setattr(kernels, "_run_kernel", scaled)


@pytest.mark.parametrize("dtype", SPREAD)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_kernel_with_another_scale_is_further(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rescaled(monkeypatch, 1.1)
    assert [column for column in further_than_rounding(name, 1, dtype) if column.startswith("attention")]


def intervened(*do: str) -> Callable[[PreTrainedModel], sinkscope.Run]:
    return lambda model: sinkscope.intervene(model, do=do, draws=1, **OPTIONS)


def quantized(model: PreTrainedModel, scheme: str) -> sinkscope.Run:
    return sinkscope.quantize(model, scheme=scheme, calibration=2, **OPTIONS)


LLAMAS = ("zero-massive:layers=1,coordinates=3", "zero-key-columns:coordinates=3", "mask-sink", "mean-sink-value")
# what is run → the model, the number of devices, the function, and the tolerance
RUNS: dict[str, tuple[str, int, Callable[[PreTrainedModel], sinkscope.Run], float]] = {
    "analyze on one": ("gpt2", 1, lambda model: sinkscope.analyze(model, **OPTIONS), 1e-3),
    "analyze on two": ("gemma2", 2, lambda model: sinkscope.analyze(model, **OPTIONS), 1e-3),
    "intervene on one": ("gpt2", 1, intervened("transplant-epe", "nullify-query-bias"), 1e-2),
    "intervene on two": ("llama", 2, intervened(*LLAMAS), 1e-2),
    "quantize": ("shallow", PLACES, lambda model: quantized(model, "static"), 1e-2),
    "quantize to formats": ("shallow", PLACES, lambda model: quantized(model, "W8A8,FP8,NVFP4"), 1e-2),
}


@pytest.mark.parametrize("what", RUNS)
def test_a_run_on_devices_has_the_tables_of_the_cpu(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY, "shallow", ("llama", TINY["llama"][1] | {"num_hidden_layers": 2}))  # one on each device
    name, places, measure, tolerance = RUNS[what]
    here = measure(tiny_model(name))
    with simulated():
        there = measure(moved(tiny_model(name), places))
    assert there.manifest["device"] == f"{NAME}:0"
    assert there.manifest["not_measured"] == here.manifest["not_measured"]
    if what == "quantize":
        assert here.tables["quantization"]["setting"].tolist() == there.tables["quantization"]["setting"].tolist()
    assert far(here.tables, there.tables, tolerance) == {}


@needs_simulation
def test_batches_fit_into_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one sequence with gradients does not fit, each layer is computed again in the backward pass."""
    from support.simulated import Device

    here = sinkscope.analyze(tiny_model("llama"), **OPTIONS)
    with simulated():
        assert sinkscope.analyze(moved(tiny_model("llama"), 2), **OPTIONS).manifest["batch_size"] == 4
        model = moved(tiny_model("llama"), 2)
        monkeypatch.setattr(Device, "free", int(19 * bytes_per_token(model, backward=True) / USABLE) + 1)
        there = sinkscope.analyze(model, **OPTIONS)
    assert there.manifest["batch_size"] == 1
    assert far(here.tables, there.tables, 1e-3) == {}


def test_sums_of_gradients_leave_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sums stay on the device; those for which it has no room are on the CPU, with the same numbers."""
    batches = batched(list(tiny_tokens(4, 20).numpy()), 2)

    def watched(bytes_there: int) -> tuple[Counter[str], Any]:
        monkeypatch.setattr(gradient, "ON_DEVICE", bytes_there)
        with simulated(), open_tracer(model := moved(tiny_model("llama")), find_family(model)) as tracer:
            observable = gradient.Gradient(SETTINGS)
            observable.prepare(model, tracer.family, 1)
            for batch in batches:
                tracer.forward_backward(batch, [observable])
            places = Counter(sums.device.type for sums in observable.groups.sums.values())
            return places, observable.tables()

    size = GROUPS * SETTINGS.positions * 8 * 4  # bytes of one head's sums in float32
    there, on_device = watched(2**30)
    few, by_both = watched(size * (4 + 2 + 2))  # query, key and value of one layer
    assert there == {NAME: 9}
    assert few == {NAME: 3, "cpu": 6}
    assert far(on_device, by_both, 0.0) == {}


def test_sums_of_gradients_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "ON_DEVICE", 0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    with pytest.raises(SinkscopeError, match="take fewer --positions"):
        measured(tiny_model("llama"), [padded(list(tiny_tokens(2, 20).numpy()))], SETTINGS, ["gradient"], backward=True)


@pytest.mark.parametrize(("name", "places"), [("llama", 2), ("gpt2", 1), ("falcon", 2)])
def test_an_unknown_family(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wiring is found in tensors of several devices."""
    if not IS_REAL:  # flex attention would be compiled for the CPU, which `doctor` does not try there
        own = compared_kernels._why_unavailable
        monkeypatch.setattr(compared_kernels, "_why_unavailable", lambda kernel, _: own(kernel, torch.device("cpu")))
    here = calibrate(tiny_model(name), tiny_tokens(2, 9))
    with simulated():
        model = moved(tiny_model(name), places)
        assert calibrate(model, tiny_tokens(2, 9).to(f"{NAME}:0")) == here
        sinkscope.doctor(model)


@pytest.mark.parametrize("label", METHODS | FURTHER)
def test_a_retrofit_is_trained(label: str) -> None:
    """One step of gradient descent has the same losses before and after it on the CPU and on devices."""
    method, parameters = (METHODS | FURTHER)[label]

    def losses(places: int) -> list[float]:
        torch.manual_seed(3)  # some starts are drawn
        model, ids = tiny_model("llama"), tiny_tokens(2, 20)
        if places:
            model, ids = moved(model, places), ids.to(f"{NAME}:0")
        batch = {"input_ids": ids, "labels": ids}
        new = [*new_parameters(retrofit_model(model, None, method, **parameters)).values()]
        if not new:
            return [model(**batch).loss.item()]
        optimizer = torch.optim.SGD([parameter.requires_grad_() for parameter in new], lr=0.1)
        before = model(**batch).loss
        before.backward()
        optimizer.step()
        return [before.item(), model(**batch).loss.item()]

    here = losses(0)
    with simulated():
        assert losses(PLACES) == pytest.approx(here, rel=1e-3)


@needs_simulation
def test_a_sweep_spawns_workers_for_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is measured on a device, by a process that this one, whose autograd has threads, does not fork."""
    from support import simulated_cells

    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    options = {"num_seqs": 4, "seq_len": 20, "positions": 8, "observables": ["attention", "gradient"]}
    cells = {"models": [str(tmp_path / "gpt2")], "inputs": ["random"], "options": options}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"title": "Devices", **cells}))
    here = sinkscope.analyze(tiny_model("gpt2"), input="random", **options)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(pools, "_main", simulated_cells.work)
    done = sinkscope.sweep(tmp_path / "sweep.yaml", out=tmp_path / "out", workers=2, page=False)
    assert not done.failure
    (there,) = (sinkscope.Run.open(tmp_path / "out" / "cells" / each.cell.name) for each in done.plan)
    assert there.manifest["device"] == f"{NAME}:0"
    assert far(here.tables, there.tables, 1e-3) == {}


def test_the_benchmark_of_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of its tables runs on a device."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import overhead

    monkeypatch.setattr(overhead, "random_batch", lambda shape, _: padded(list(tiny_tokens(*shape).numpy())))
    monkeypatch.setattr(overhead, "ARMS", ("zero-massive:layers=1,coordinates=3", "mask-sink"))
    with simulated(), torch.no_grad():
        for passes in overhead.variants_of(moved(tiny_model("llama")), (2, 70)).values():
            assert all(one_pass() > 0 for one_pass in passes.values())


# at 8 × 64 tokens, 16 positions, in float32: kernel launches by layer, and waits for the device and copies of a batch;
# FORWARD has those of the other observables. The second of two is for sequences of several lengths.
BUDGETS = {
    (): ((37, 1, 1), (38, 2, 2)),
    ("attention",): ((66, 3, 5), (69, 6, 12)),
    FORWARD: ((106, 5, 6), (140, 9, 15)),
    ("gradient",): ((224, 3, 6), (248, 4, 12)),
    (*FORWARD, "gradient"): ((290, 6, 10), (347, 10, 20)),
    ("attention", "massive", "mask-sink"): ((104, 7, 7), (105, 10, 14)),
}
DEPTH = 32
SLACK = 2 if IS_REAL else 1  # an operation of PyTorch may launch several of CUDA's kernels


def spent_on_a_batch(
    names: tuple[str, ...], is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float, float]:
    """Return the launches by layer, the waits and the copies of a batch; names are of observables or interventions."""
    for module in (tracer, massive):  # as many copies of sites as at Llama-2-7B's width
        monkeypatch.setattr(module, "copied_entries", lambda device: copied_entries(device) * 32 // 4096)
    monkeypatch.setattr(massive, "ENTRIES_AT_ONCE", massive.ENTRIES_AT_ONCE * 32 // 4096)
    lengths = range(64, 64 - 8 * 3 * is_padded, -3) if is_padded else [64] * 8
    settings = Settings(positions=16, window=64)
    with simulated():
        model = moved(tiny_model("llama", num_hidden_layers=DEPTH))
        changes = [parse(name) for name in names if name not in OBSERVABLES]
        with open_tracer(model, find_family(model), interventions=changes) as opened:
            observables = [OBSERVABLES[name](settings) for name in names if name in OBSERVABLES]
            for observable in observables:
                observable.prepare(model, opened.family, 1)
            run = opened.forward_backward if "gradient" in names else opened.forward
            run(padded(ragged_tokens(lengths)), observables)
            second = padded(ragged_tokens(lengths))  # when all sums are there
            with counting() as counts:
                run(second, observables)
    return counts["launches"] / DEPTH, counts["synchronizations"], counts["copies"]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("names", BUDGETS, ids=lambda names: "-".join(names) or "nothing")
def test_budget_of_a_batch(names: tuple[str, ...], is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch costs no more launches, waits for the device and copies than its budget: lower it with a saving."""
    spent = spent_on_a_batch(names, is_padded, monkeypatch)
    allowed = [SLACK * budget for budget in BUDGETS[names][is_padded]]
    assert all(cost <= budget for cost, budget in zip(spent, allowed, strict=True)), spent


# kernel launches, waits for the device and copies of a whole command with 4 layers: lower them with every saving
COMMAND_BUDGETS = {
    "analyze": (3_860, 42, 55),
    "gradients": (2_930, 24, 34),
    "watch": (1_390, 32, 32),
    "quantize": (12_620, 86, 108),
    "formats": (29_370, 272, 267),
    "kv-plan": (7_340, 53, 96),
}


@pytest.mark.parametrize("command", COUNTED_COMMANDS)
def test_budget_of_a_command(command: str) -> None:
    with simulated():
        model = moved(tiny_model("llama", num_hidden_layers=4))
        with counting() as counts:
            COUNTED_COMMANDS[command](model)
    spent = counts["launches"], counts["synchronizations"], counts["copies"]
    assert all(cost <= SLACK * allowed for cost, allowed in zip(spent, COMMAND_BUDGETS[command], strict=True)), spent


@pytest.mark.parametrize("x", [torch.zeros(1), torch.zeros(1, dtype=torch.bool)], ids=["to the device", "from it"])
def test_a_wait_a_layer_exceeds_the_budget(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def see(self: Any, layer: int, read: Any, batch: Any) -> None:
        x.to(read.lse.device) if x.dtype == torch.float32 else bool((read.lse > 0).any())

    names = ("attention",)
    monkeypatch.setattr(OBSERVABLES["attention"], "see_attention", see)
    assert spent_on_a_batch(names, False, monkeypatch)[1] >= DEPTH > SLACK * BUDGETS[names][0][1]


@needs_simulation
def test_a_mixing_of_devices_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    see = OBSERVABLES["attention"].see_attention

    def mixing(self: Any, layer: int, read: Any, batch: Any) -> None:
        read.lse + batch.token_ids[:, None]
        see(self, layer, read, batch)

    monkeypatch.setattr(OBSERVABLES["attention"], "see_attention", mixing)
    with simulated(), pytest.raises(Exception, match="at least two devices"):
        sinkscope.analyze(moved(tiny_model("llama")), **OPTIONS)


@needs_simulation
def test_tensors_of_several_kinds_are_copied_together() -> None:
    column, number = torch.arange(12.0).view(3, 4)[:, 1], torch.tensor(7, dtype=torch.int16)
    with simulated():
        there = [torch.arange(12.0).to(NAME).view(3, 4)[:, 1], number.to(NAME)]  # the first is not contiguous
        with counting() as counts:
            here = on_cpu([column, *there])
    assert counts["synchronizations"] == 1
    assert all(torch.equal(x, expected) for x, expected in zip(here, (column, column, number), strict=True))


def test_a_model_that_is_split_by_hand() -> None:
    """accelerate knows nothing of it; hooks of the user move what passes from one device to the other."""
    here = sinkscope.analyze(tiny_model("llama"), **OPTIONS)
    with simulated():
        model: Any = tiny_model("llama")
        second = (model.model.layers[-1], model.model.norm, model.lm_head)
        for module in (model.model.embed_tokens, model.model.rotary_emb, *model.model.layers[:-1]):
            module.to(f"{NAME}:0")
        for module in second:
            module.to(f"{NAME}:{PLACES - 1}").register_forward_pre_hook(to_second, with_kwargs=True)
        there = sinkscope.analyze(model, **OPTIONS)
    assert far(here.tables, there.tables, 1e-3) == {}


def to_second(module: Any, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda x: x.to(f"{NAME}:{PLACES - 1}") if isinstance(x, torch.Tensor) else x, (args, kwargs))


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


PARITY: dict[str, Any] = OPTIONS | {"observables": ("massive",), "num_seqs": 2}


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_products_in_tf32_are_no_other_function(name: str) -> None:
    """The fused kernel and the model's own attention round the factors of their products at different places."""
    with simulated():
        run = sinkscope.analyze(moved(tiny_model(name, spread=2.0)), **PARITY)
    assert run.manifest["parity"] > 0  # they do


def test_parity_at_depth_32_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round-off that 32 layers add up is no false alarm, and another scale of the logits in one layer is an alarm."""

    def deep() -> Any:
        return moved(tiny_model("llama", dtype=torch.bfloat16, spread=4.0, num_hidden_layers=32), PLACES)

    with simulated():
        assert sinkscope.analyze(deep(), **PARITY).manifest["parity"] is not None

        rescaled(monkeypatch, 1.2)
        with pytest.raises(SinkscopeError, match="computes a different attention"):
            sinkscope.analyze(deep(), **PARITY)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
@pytest.mark.parametrize("case", CALLS)
def test_kernels(case: str, capability: tuple[int, int]) -> None:
    """They take the widths, dtypes and biases that CUDA's kernels take on a GPU of this compute capability."""
    with simulated(capability):
        for dtype in ERRORS if capability >= (8, 0) else (torch.float16, torch.bfloat16):  # kernels take others alike
            check_outcome(case, dtype, f"{NAME}:0", LENGTHS if IS_REAL else (1, 33, 40))  # odd, and a multiple of 8


def test_which_kernel_serves_which_case() -> None:
    with simulated():
        check_kernels(f"{NAME}:0")


@pytest.mark.skipif(not IS_REAL, reason="needs a GPU that accelerate knows")
def test_a_model_that_is_loaded_onto_a_gpu(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    here, there = (sinkscope.analyze(tmp_path, device_map=where, **OPTIONS) for where in ("cpu", "auto"))
    assert "cuda" in str(there.manifest["device"])
    assert far(here.tables, there.tables, 1e-3) == {}
