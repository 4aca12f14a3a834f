"""Models given as objects: wrapped, in train mode, compiled, or no models at all; and the state that commands leave."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from support.encoders import word_tokenizer
from support.everything import differences, snapshot
from support.figures import skip_figures
from support.ranks import on_two_ranks
from support.retrofitted import each_pair
from support.tables import assert_same_tables
from tiny import REPRESENTATIVE, tiny_model, tiny_tokens
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer
from transformers.pytorch_utils import Conv1D

import sinkscope
from sinkscope import InputError, Run, doctor
from sinkscope.commands.train.trainer import check_trainable
from sinkscope.measuring.nnsight import NNsight
from sinkscope.models.families import find_family
from sinkscope.models.in_memory import fingerprint, same_random_numbers, unwrapped
from sinkscope.models.loading import LoadedModel
from sinkscope.quantization.sites import sites_of

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 3, "seq_len": 10}


def with_adapter(model: PreTrainedModel) -> Any:
    modules = ["q_proj", "k_proj", "v_proj"]
    config = peft.LoraConfig(r=2, target_modules=modules, lora_dropout=0.5, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def with_prompt(model: PreTrainedModel) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def assert_equal(run: Run, expected: Run, **how: float) -> None:
    assert_same_tables(run.tables, expected.tables, ["model"], **how)


@pytest.fixture(scope="module")
def plain() -> Run:
    return sinkscope.analyze(tiny_model("llama"), **SMALL)


def test_a_wrapped_model_is_measured_as_the_plain_one(plain: Run) -> None:
    model = tiny_model("llama")
    wrapped = torch.compile(nn.DataParallel(model))
    assert unwrapped(wrapped) is unwrapped(model) is model
    assert_equal(sinkscope.analyze(wrapped, **SMALL), plain)


def test_a_model_with_an_adapter_is_measured_as_the_merged_one(plain: Run) -> None:
    adapted, twin = with_adapter(tiny_model("llama")), with_adapter(tiny_model("llama"))
    twin.load_state_dict(adapted.state_dict())
    options = SMALL | {"observables": ("attention", "gradient")}
    run, merged = (sinkscope.analyze(model, **options) for model in (adapted, twin.merge_and_unload()))
    assert_equal(run, merged, rtol=1e-3, atol=1e-5)
    assert run.metric("window_mass") != pytest.approx(plain.metric("window_mass"), rel=1e-3)
    # the weights alone are those without the adapter
    with pytest.raises(InputError, match="it projects by peft's Linear, not by one matrix: merge its adapter first"):
        sinkscope.intervene(adapted, "zero-key-columns:coordinates=3", **SMALL)
    with pytest.raises(InputError, match=r"without a separate adapter \(.*q_proj.base_layer\): merge it"):
        sites_of(adapted.get_base_model(), find_family(tiny_model("llama")))


def with_hooks_of_accelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Add the hooks that --device-map auto adds for several devices, here for one device."""
    for module in model.modules():
        if module is not model:
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


DISPATCHED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "dispatched": with_hooks_of_accelerate,
    "offloaded": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
}


@pytest.mark.parametrize("kind", DISPATCHED)
def test_a_model_that_accelerate_dispatches_is_measured_as_the_plain_one(kind: str, plain: Run) -> None:
    """If accelerate has hooked a module, nnsight runs the forward of the class, which would ignore edits."""
    model = DISPATCHED[kind](tiny_model("llama"))
    assert_equal(sinkscope.analyze(model, **SMALL), plain)
    both = (model, tiny_model("llama"))
    assert_equal(*(sinkscope.intervene(of, "scale-sink-value", draws=0, **SMALL) for of in both))
    schemes, moved = {"scheme": "FP8", "cure": "spare,rotation", "calibration": 2}, kind == "offloaded"
    runs = [sinkscope.quantize(of, **schemes, **SMALL) for of in both]
    assert runs[0].tables["formats"].equals(runs[1].tables["formats"])
    assert ("offloaded" in runs[0].manifest["served"]["absent_cures"].get("FP8", {}).get("rotation", "")) == moved
    if moved:
        assert doctor(model).ok
        with pytest.raises(InputError, match="offloaded"):
            check_trainable(model, only_new=False)


def wrapped_by_fsdp(model: PreTrainedModel) -> nn.Module:
    """Return a model inside the wrapper of FSDP's first version, which needs a GPU to be made in earnest."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = model
    return wrapper


class Bridge(nn.Module):
    """A stand-in for TransformerLens's bridge of one module of transformers, which it replaces and calls."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original_component = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a bridge attends by itself")


class TransformerBridge(nn.Module):
    """A stand-in for TransformerLens's model, which keeps the one of transformers with bridges in it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for layer in model.model.layers:
            layer.self_attn.q_proj = Bridge(layer.self_attn.q_proj)
            layer.self_attn, layer.mlp = Bridge(layer.self_attn), Bridge(layer.mlp)
        self.original_model = model


def prepared_by_accelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model compute in bfloat16, as `Accelerator(mixed_precision="bf16").prepare` does."""
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    return model


HELD: dict[str, Callable[[PreTrainedModel], Any]] = {
    "nnsight": NNsight,
    "a bridge": TransformerBridge,
    "accelerate": prepared_by_accelerate,
}


@pytest.mark.parametrize("kind", HELD)
def test_a_model_in_another_library_is_measured_as_the_plain_one(kind: str, plain: Run) -> None:
    held = HELD[kind](tiny_model("llama"))
    assert_equal(sinkscope.analyze(held, **SMALL), plain)
    if kind == "a bridge":
        message = "TransformerBridge calls parts of its own, which cannot be changed: pass the model"
        with pytest.raises(InputError, match=message), sinkscope.intervening(held, "mask-sink"):
            pass


def test_what_a_wrapper_changes_is_refused_by_name() -> None:
    edited = NNsight(tiny_model("llama"))
    with edited.edit(inplace=True):
        edited.model.layers[1].output[:] = 0
    bridge: Any = TransformerBridge(tiny_model("llama"))
    bridge.hook = nn.Identity()
    bridge.hook.fwd_hooks = ["a hook"]
    peft_model = with_adapter(tiny_model("llama"))
    compiled = torch.compile(tiny_model("llama"), backend="eager")
    for hooked in (peft_model.base_model, compiled):
        hooked.register_forward_hook(lambda module, args, output: None)
    for wrapper, match in (
        (edited, r"NNsight has edits .*clear_edits"),
        (bridge, r"has hooks \(add_hook\)"),
        (peft_model, "Peft.* has a forward hook, .*test_in_memory"),
        (compiled, "OptimizedModule has a forward hook"),
    ):
        with pytest.raises(InputError, match=match):
            unwrapped(wrapper)
    edited.clear_edits()
    assert unwrapped(edited) is edited._module


def test_a_hook_that_removes_itself_runs_once_and_what_hooks_set_stays() -> None:
    model, seen = tiny_model("llama"), list[str]()
    first, second = model.model.layers[0], model.model.layers[1]

    def once(module: Any, args: tuple, output: Any) -> None:
        seen.append("once")
        handle.remove()

    def capture(module: Any, args: tuple, kwargs: Any, output: torch.Tensor) -> None:
        model.captured, module.calls = output, module.calls + 1
        module.counts["calls"] = module.calls

    handle = first.register_forward_hook(once, always_call=True)
    second.register_forward_hook(capture, with_kwargs=True)
    second.calls, second.counts = 0, {}
    before = dict(second._forward_hooks)
    sinkscope.analyze(model, observables="massive", **SMALL)
    assert (seen, len(first._forward_hooks), len(first._forward_hooks_always_called)) == (["once"], 0, 0)
    assert second.counts == {"calls": second.calls}
    assert second.calls > 1
    assert model.captured.shape[1:] == (10, 32)
    assert second._forward_hooks == before
    assert "forward" not in vars(second)  # all else is restored


def test_the_tokenizer_of_a_wrapper_is_used() -> None:
    wrapper: Any = SimpleNamespace(_module=tiny_model("llama"), tokenizer=word_tokenizer())
    assert sinkscope.analyze(wrapper, input=["w1 w2 w3"], observables="massive").manifest["input"]["tokens"] == 4


NO_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tuple": (lambda: (tiny_model("llama"), None), "builtins.tuple is not a model"),
    "a trainer": (lambda: Trainer(tiny_model("llama")), r"Trainer is not a model \(pass its `model`\)"),
    "hooked": (lambda: SimpleNamespace(hook_dict={}), "has weights in a layout of its own: pass the model of transf"),
    "a wrapper": (lambda: nn.Sequential(tiny_model("llama")), "Sequential is not a model"),
    "a loaded number": (lambda: LoadedModel(3, None, "x", "x", None, None, ()), "builtins.int is not a model"),  # type: ignore[arg-type]
    "prompts": (lambda: with_prompt(tiny_model("llama")), "PEFT's prompts"),
    "parts": (lambda: wrapped_by_fsdp(tiny_model("llama")), "sharded over several processes"),
}


@pytest.mark.parametrize("what", NO_MODELS)
def test_what_is_no_model_is_refused_by_its_type(what: str, tmp_path: Path) -> None:
    make, message = NO_MODELS[what]
    for command in (
        lambda model, out: sinkscope.analyze(model, out=out, **SMALL),
        lambda model, out: sinkscope.intervene(model, "mask-sink", out=out, **SMALL),
        lambda model, out: sinkscope.retrofit(model, "vga", out=out, text="natural"),
    ):
        with pytest.raises(InputError, match=message):
            command(make(), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="a name or a path is needed"):
        sinkscope.train(make(), "vga", out=tmp_path / "out", text="natural")


def test_a_model_of_which_each_process_has_a_part_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "llama")

    def refused() -> None:
        dist.init_process_group("gloo")
        tensor_parallel = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", tp_plan="auto")
        for model in (tensor_parallel, fully_shard(tiny_model("llama"))):
            with pytest.raises(InputError, match="save the model and name its folder, or load it"):
                sinkscope.analyze(model, **SMALL)

    ended = on_two_ranks(refused, tmp_path / "log")
    assert ended == [0, 0], (tmp_path / "log").read_text()[-4000:]


def test_train_mode_and_the_callers_modes_change_nothing() -> None:
    """GPT-2 has dropout."""
    expected = sinkscope.analyze(tiny_model("gpt2"), **SMALL)
    model = tiny_model("gpt2").train()
    model.gradient_checkpointing_enable()
    before = snapshot(model)
    for mode in (nullcontext(), torch.inference_mode()):
        with mode, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_equal(sinkscope.analyze(model, **SMALL), expected)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_a_model_compiled_in_place_is_measured_and_stays_compiled(name: str) -> None:
    expected = sinkscope.analyze(tiny_model(name), **SMALL)
    model = tiny_model(name)
    calls: list[int] = []
    model.compile(backend=lambda graph, inputs: calls.append(1) or graph.forward)
    before = snapshot(model)
    assert_equal(sinkscope.analyze(model, **SMALL), expected)
    assert differences(before, snapshot(model)) == []
    assert not calls


def test_the_fingerprint_depends_on_what_is_computed(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    seen = {fingerprint(model)}
    model.get_input_embeddings().weight.data[1, 1] += 1e-3  # a sample of a few evenly spaced entries would miss it
    seen.add(fingerprint(model))
    model.config.rms_norm_eps *= 2
    seen.add(fingerprint(model))
    model.model.rotary_emb.inv_freq[-1] *= 2
    assert len({*seen, fingerprint(model), fingerprint(model.to(torch.bfloat16))}) == 5
    for name in "ab":  # the result must not depend on the folder
        model.save_pretrained(tmp_path / name)
    assert len({fingerprint(type(model).from_pretrained(tmp_path / name)) for name in "ab"}) == 1


COMMANDS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "analyze": lambda model: sinkscope.analyze(model, **SMALL),
    "intervene": lambda model: sinkscope.intervene(model, ["mask-sink", "scale-sink-value"], draws=1, **SMALL),
    "quantize": lambda model: sinkscope.quantize(
        model, scheme="static", calibration=1, bits_weights=16, bits_activations=16, **SMALL
    ),
    "doctor": doctor,
}
# ending → the error, and what the command raises, which names the module of an exception
ENDINGS: dict[str, tuple[type[BaseException] | None, Any]] = {
    "normal": (None, None),
    "exception": (ZeroDivisionError, sinkscope.SinkscopeError),
    "interrupt": (KeyboardInterrupt, KeyboardInterrupt),
}


def break_down(model: PreTrainedModel, layer: int, error: type[BaseException]) -> None:
    """Raise an error at the second call of a linear module of the layer."""
    calls: list[int] = []

    def fail(module: nn.Module, args: tuple, output: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error("made up")

    modules = find_family(model).layer_modules(model)[layer].modules()
    next(module for module in modules if isinstance(module, nn.Linear | Conv1D)).register_forward_hook(fail)


def used(name: str) -> PreTrainedModel:
    """A model in the middle of a training: with gradients and hooks, and partly frozen."""
    model = tiny_model(name).train()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(True)
    model(tiny_tokens(1, 6), labels=tiny_tokens(1, 6)).loss.backward()
    layer = find_family(model).layer_modules(model)[1]
    layer.eval()
    layer.register_forward_hook(lambda module, args, output: None)
    model.register_forward_pre_hook(lambda module, args: None)
    model.config.use_cache = True
    return model


@each_pair(REPRESENTATIVE, [f"{command}, {ending}" for ending in ENDINGS for command in COMMANDS])
def test_nothing_is_left(name: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    command, ending = label.split(", ")
    model, (error, raised) = used(name), ENDINGS[ending]
    if error is not None:
        break_down(model, len(name) % 3, error)
    before = snapshot(model)
    with nullcontext() if raised is None else pytest.raises(raised):
        COMMANDS[command](model)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("every", ["_all", ""])
def test_all_random_numbers_are_restored(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Python, numpy and torch, of an accelerator (all CUDA devices, or MPS's one), and of what holds some."""
    device = SimpleNamespace(state=[1])
    setattr(device, f"get_rng_state{every}", lambda: list(device.state))
    setattr(device, f"set_rng_state{every}", lambda state: setattr(device, "state", state))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    held = SimpleNamespace(inner=[SimpleNamespace(rng=np.random.default_rng(0), generator=torch.Generator())])

    def draw() -> list[float]:
        device.state.append(2)
        inner = held.inner[0]
        more = [inner.rng.random(), float(torch.rand((), generator=inner.generator))]
        return [random.random(), float(np.random.rand()), float(torch.rand(())), len(device.state), *more]  # noqa: NPY002

    with same_random_numbers(held):
        drawn = draw()
    with pytest.raises(ZeroDivisionError), same_random_numbers(held):
        _ = draw()[0] / 0
    assert draw() == drawn
