"""`intervening` for any use of a model: several blocks at once, wrappers, attention functions and hooks of the user."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import peft
import pytest
import torch
from support.everything import differences, snapshot
from support.forked import forked
from support.retrofitted import each_pair
from tiny import tiny_model, tiny_tokens
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sinkscope
from sinkscope import InputError, intervening

IDS = tiny_tokens(2, 9)
SMALL: dict[str, Any] = {"input": "random", "num_seqs": 3, "seq_len": 10}
DO = {"llama": "mask-sink", "qwen2": "scale-sink-value:factor=3", "bloom": "mask-sink", "falcon": "mask-sink:heads=1"}


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def under(model: Any, *do: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    with intervening(model, *do, **options):
        return logits(model, ids)


def test_interventions_are_applied_in_the_given_order() -> None:
    model = tiny_model("llama")
    first, second = (f"mean-massive:layers=1,coordinates=3,means={mean}" for mean in ("10.0", "20.0"))
    assert torch.equal(under(model, first, second), under(model, second))
    assert not torch.equal(under(model, first), under(model, second))


def test_layers_that_no_intervention_on_attention_reaches_are_named() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    once = attention.forward
    attention.forward = lambda hidden_states, **kwargs: once(once(hidden_states, **kwargs)[0], **kwargs)
    with pytest.warns(UserWarning, match=r"weights are not read in 1 layer \(1\): .* leave it as it is there"):
        assert not torch.equal(under(model, "mask-sink"), logits(model))


def test_blocks_that_end_in_any_order_change_their_own_models() -> None:
    """The block that begins first ends first, and the other model is still changed."""
    names = "llama", "bloom"
    one, other = (tiny_model(name) for name in names)
    plain, changed = [logits(one), logits(other)], [under(one, DO[names[0]]), under(other, DO[names[1]])]
    assert not any(map(torch.equal, plain, changed))
    first, second = intervening(one, DO[names[0]]), intervening(other, DO[names[1]])
    first.__enter__()
    assert torch.equal(logits(other), plain[1])
    second.__enter__()
    assert torch.equal(logits(one), changed[0])
    assert torch.equal(logits(other), changed[1])
    first.__exit__(None, None, None)
    assert torch.equal(logits(one), plain[0])
    assert torch.equal(logits(other), changed[1])
    second.__exit__(None, None, None)
    assert torch.equal(logits(other), plain[1])
    assert type(ALL_ATTENTION_FUNCTIONS) is AttentionInterface


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the result of `work` in each of several threads that begin together; raise an error of any."""
    together = threading.Barrier(count)

    def run(at: int) -> Any:
        together.wait()
        return work(at)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_threads_that_change_their_own_models_or_call_one_or_analyze_do_not_meet() -> None:
    names = [*DO, *DO]
    models = [tiny_model(name) for name in names]
    expected = [under(model, DO[name]) for model, name in zip(models, names, strict=True)]
    in_parallel = in_threads(len(names), lambda at: [under(models[at], DO[names[at]]) for _ in range(10)])
    for repeated, wanted in zip(in_parallel, expected, strict=True):
        assert all(torch.equal(x, wanted) for x in repeated)
    assert type(ALL_ATTENTION_FUNCTIONS) is AttentionInterface
    model = tiny_model("llama")
    texts = [tiny_tokens(2, 9 + at) for at in range(4)]
    expected = [under(model, ["mask-sink"], ids=ids) for ids in texts]
    with intervening(model, "mask-sink"):
        in_parallel = in_threads(4, lambda at: logits(model, texts[at]))
    assert all(map(torch.equal, in_parallel, expected))
    names = ["llama", "bloom", "qwen2"]
    measure = partial(sinkscope.analyze, observables=("attention",), **SMALL)
    alone = [measure(tiny_model(name)) for name in names]
    models = [tiny_model(name) for name in names]
    for run, expected in zip(in_threads(3, lambda at: measure(models[at])), alone, strict=True):
        assert all(run.tables[name].equals(table) for name, table in expected.tables.items())


def lora(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def on_input(module: Any, args: Any) -> Any:
    return (args[0].flip(-1),)


def with_forward(projection: Any) -> None:
    own = projection.forward
    projection.forward = lambda x: 1.5 * own(x)


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda projection: projection.register_forward_hook(lora), "forward hook, .*lora"),
    "pre-hook": (lambda projection: projection.register_forward_pre_hook(on_input), "forward hook, .*on_input"),
    "forward": (with_forward, "its forward is"),
    "prune": (lambda projection: prune.l1_unstructured(projection, "weight", amount=0.5), "its weight is not a"),
    "parametrize": (
        lambda projection: parametrize.register_parametrization(projection, "weight", nn.Tanh()),
        "its weight is not a",
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_projection_that_is_more_than_its_weight_is_not_edited(how: str) -> None:
    change, message = CHANGED[how]
    model = tiny_model("qwen2")
    change(model.model.layers[1].self_attn.k_proj)
    before = snapshot(model)
    keys = "zero-key-columns:coordinates=3"
    with pytest.raises(InputError, match=message):
        under(model, keys)
    with pytest.raises(InputError, match=rf"layers.1.self_attn.k_proj .*{message}"):
        sinkscope.quantize(model, calibration=2, **SMALL)
    under(model, "nullify-query-bias", "mask-sink")  # interventions that do not edit it
    run = sinkscope.analyze(model, **SMALL)
    assert ("query_bias" in run.tables) == (message == "its weight is not a")  # read from the weights
    computed = {"model.layers.1.self_attn.k_proj: attributes"} if how == "prune" else set()  # at each forward
    assert set(differences(before, snapshot(model))) <= computed


def with_adapter(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def with_compiled_forward(model: PreTrainedModel) -> PreTrainedModel:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model: PreTrainedModel) -> PreTrainedModel:
    model.compile(backend="eager")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


GIVEN: dict[str, Callable[[PreTrainedModel], Any]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": partial(torch.compile, backend="eager"),
    "a compiled forward": with_compiled_forward,
    "compiled in place": compiled_in_place,
}


@each_pair(list(GIVEN), ["mask-sink", "zero-key-columns:coordinates=3", "rescale-norm:layers=1"], ("kind", "text"))
def test_a_wrapped_model_is_changed_as_the_plain_one(kind: str, text: str) -> None:
    expected, plain = under(tiny_model("llama"), text), logits(tiny_model("llama"))
    wrapped = GIVEN[kind](tiny_model("llama"))
    before = logits(wrapped)  # compiles
    assert torch.equal(under(wrapped, text), expected)
    assert torch.equal(logits(wrapped), before)
    assert torch.equal(before, plain)


def test_a_model_with_an_adapter_is_changed_as_the_merged_one_and_one_of_no_known_type_as_its_family() -> None:
    expected = under(with_adapter(tiny_model("llama")).merge_and_unload(), "mask-sink")
    assert torch.allclose(under(with_adapter(tiny_model("llama")), "mask-sink"), expected, rtol=1e-4, atol=1e-4)
    expected, model = under(tiny_model("llama"), "mask-sink"), tiny_model("llama")
    model.config.model_type = "of_nobody"  # its row is found numerically
    assert torch.equal(under(model, "mask-sink"), expected)


LARGE, AT = 3000.0, 5  # an entry of the embedding of token 1, and its coordinate


def without_entry(module: Any, args: Any, output: Any) -> Any:
    """Set the massive entry of position 0 to 0, in the step of `generate` that reads the prompt."""
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.shape[1] > 1:
        hidden[:, 0, AT] = 0.0
    return output


def test_what_is_left_open_is_found_by_measuring_and_generate_is_changed() -> None:
    """Sequences begin with token 1, whose embedding has a massive entry, which all layers pass on."""
    model: Any = tiny_model("llama")
    model.get_input_embeddings().weight.data[1, AT] = LARGE
    prompts = torch.cat([torch.ones(3, 1, dtype=torch.long), tiny_tokens(3, 9) % 90 + 3], dim=1)
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before, plain = snapshot(model), model.generate(prompts, **settings)
    with intervening(model, ["zero-massive", "mask-sink:positions=3"], input=prompts):
        changed = model.generate(prompts, **settings)
    assert differences(before, snapshot(model)) == []
    hooks = [layer.register_forward_hook(without_entry) for layer in model.model.layers]
    with intervening(model, "mask-sink:positions=3"):
        expected = model.generate(prompts, **settings)
    for hook in hooks:
        hook.remove()
    assert torch.equal(changed.sequences, expected.sequences)
    assert all(map(torch.equal, changed.logits, expected.logits))
    assert not any(map(torch.equal, changed.logits, plain.logits))
    assert torch.equal(model.generate(prompts, **settings).sequences, plain.sequences)


def test_what_cannot_be_found_is_told() -> None:
    model = tiny_model("llama")
    for options, message in (
        ({"input": IDS}, "^zero-massive: no massive activations at position 0 are known: name layers and coordinates$"),
        ({}, "name layers and coordinates\\nIt could not be found by measuring: natural text needs a tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            under(model, "zero-massive", **options)


def test_copies_on_several_devices_are_refused() -> None:
    copies = nn.DataParallel(tiny_model("llama"))
    copies.device_ids = [0, 1]
    with pytest.raises(InputError, match="DataParallel on several devices"):
        under(copies, "mask-sink")


def test_a_block_leaves_the_gradient_mode_to_its_user() -> None:
    model = tiny_model("llama").requires_grad_(True)
    with torch.inference_mode():
        inferred = under(model, "zero-key-columns:coordinates=3")
    with torch.no_grad(), intervening(model, "zero-key-columns:coordinates=3"):
        assert not model(IDS).logits.requires_grad
    with intervening(model, "zero-key-columns:coordinates=3"):
        computed = model(IDS, use_cache=False).logits
        computed.sum().backward()
    assert torch.equal(computed.detach(), inferred)
    assert model.model.layers[0].self_attn.v_proj.weight.grad is not None


def imported_again(script: str) -> None:
    """Run a script that imports nnsight and sinkscope as if for the first time, in a separate process."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nnsight", "sinkscope")]:
        del sys.modules[name]
    exec(script, {})


@pytest.mark.parametrize(
    "script",
    [
        "import sinkscope.measuring.tracer; assert not hasattr(5, 'save'), 'mounted'",
        "import nnsight; import sinkscope.measuring.tracer; assert hasattr(5, 'save')",
        "import sinkscope.measuring.tracer; from nnsight.schema.config import CONFIG; import nnsight;"
        "assert CONFIG.APP.PYMOUNT and nnsight.CONFIG is CONFIG",
        "import torch; own = torch.Tensor.backward; import sinkscope.measuring.tracer;"
        "assert torch.Tensor.backward is own",
        "import random; state = random.getstate(); import sinkscope; sinkscope.analyze;"
        "assert random.getstate() == state",
    ],
)
def test_builtins_are_as_they_were(script: str) -> None:
    """nnsight mounts `save` on all objects, and replaces `Tensor.backward`; sinkscope prevents this unless the user has
    imported nnsight before. rich draws a random number when it is imported.
    """
    with forked(lambda: imported_again(script)) as process:
        assert process.wait() == 0
