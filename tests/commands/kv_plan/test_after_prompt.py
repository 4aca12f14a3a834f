"""Caches that are pruned after the prompt: scores on exact cases, plain transformers under a mask, and questions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sinkscope.attention.kernels import AttentionCall, fused_attention
from sinkscope.attention.seam import open_seam
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.kv_plan import eviction
from sinkscope.commands.kv_plan import study as studies
from sinkscope.commands.kv_plan.caches import attending_after_evictions, attending_with_plans
from sinkscope.commands.kv_plan.eviction import EVICTIONS, EXPECTED, PromptRead, after_eviction, mean_rotation
from sinkscope.commands.kv_plan.plan import Plan, Sizes
from sinkscope.commands.kv_plan.study import PlanCost
from sinkscope.commands.kv_plan.texts import KEY, VALUE, CopiedText, questions_of
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

INF = float("inf")


def read_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prompt: int, kept: int) -> PromptRead:
    """Return the attention of queries (H,T,d) over keys and values (K,T,d), with a scaling of 1/2."""
    tensors = [x[None].double() for x in (query, key, value)]
    call, ids = AttentionCall(None, 0.5), torch.zeros(1, query.shape[1], dtype=torch.long)
    attention = AttentionRead(*tensors, fused_attention(*tensors, call)[1], call, Batch(ids, torch.ones_like(ids)))
    return PromptRead(attention, prompt, kept, tensors[0])


def test_scores_of_observed_queries_by_hand() -> None:
    """The last two queries of a prompt of six tokens weigh its keys by powers of two: (1, 2, 1, 4, 1, 1) in head 0."""
    powers = 2 * torch.log(torch.tensor([1.0, 2, 1, 4, 1, 1, 1]))[None, :, None]  # one of two keys' coordinates is 1
    query = torch.cat([torch.ones(1, 7, 1), torch.zeros(1, 7, 1)])
    read = read_of(query, powers, powers, prompt=6, kept=4)
    first, second = torch.tensor([1.0, 2, 1, 4]), torch.ones(4)
    head = (first / 9 + first / 10) / 2, (second / 5 + second / 6) / 2
    pooled = [torch.stack([x[[0, 1, 2]].sum(), x.sum(), x.sum(), x[[1, 2, 3]].sum()]) / 5 for x in head]
    scores = EVICTIONS["snapkv"](read)[0]
    torch.testing.assert_close(scores[:4].float(), sum(pooled) / 2)
    assert scores[4:].tolist() == [INF, INF]
    last = EVICTIONS["tova"](read)[0]
    torch.testing.assert_close(last[:5].float(), (torch.tensor([1.0, 2, 1, 4, 1]) / 10 + 1 / 6) / 2)
    assert last[5] == INF


def test_snapkv_observes_a_limited_number_of_queries() -> None:
    read = read_of(*torch.randn(3, 1, 150, 2), prompt=149, kept=2 * eviction.OBSERVED + 2)
    assert int(EVICTIONS["snapkv"](read).isinf().sum()) == eviction.OBSERVED


def test_expected_attention_by_hand() -> None:
    """Queries of mean 2 and variance 1 give a key k the exponent k + k²/8; each of two heads has half of the mean."""
    queries = torch.tensor([9.0, 9, 9, 9, 1, 3, 1, 3, 9])[None, :, None]
    key = torch.tensor([[9.0, 9, 9, 9, 0, 1, 2, -2, 9], [9.0, 9, 9, 9, 2, 0, -2, 1, 9]])[..., None]
    value = torch.tensor([9.0, 9, 9, 9, 1, -2, 3, 4, 9])[None, :, None].expand(2, -1, -1)
    scores = EVICTIONS[EXPECTED](read_of(torch.cat([queries, 0 * queries] * 2), key, value, prompt=8, kept=4))
    exponents = (key + key**2 / 8)[:, 4:8, 0].double()
    shares = (exponents.softmax(-1) + 1 / 4) / 2
    torch.testing.assert_close(scores[:, 4:], shares * torch.tensor([1.0, 2, 3, 4]).double())
    assert scores[:, :4].tolist() == [[INF] * 4] * 2


def test_what_follows_sees_what_is_kept() -> None:
    query, key, value = (torch.randn(heads, 9, 4).double() for heads in (4, 2, 2))
    scores = torch.tensor([[9.0, 5, 4, 3, 2, 1], [9.0, 1, 2, 3, 4, 5]])
    read = read_of(query, key, value, prompt=6, kept=2)
    mix = after_eviction(read.attention, scores[None], [2], reach=5)  # the first token is out of reach
    seen = torch.zeros(4, 3, 9, dtype=torch.bool)
    seen[:2, :, [1, 2]] = seen[2:, :, [4, 5]] = True
    seen[:, :, 6:] = torch.ones(3, 3, dtype=torch.bool).tril()
    logits = (0.5 * query[:, 6:] @ key.repeat_interleave(2, 0).mT).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(mix[0], logits.softmax(-1) @ value.repeat_interleave(2, 0))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "mistral"])
def test_equals_a_masked_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every even token of a prompt of 20 is kept, of a sliding window of 6 tokens the last ones."""
    model, ids = tiny_model(name, dtype=torch.float64, spread=6.0), tiny_tokens(1)
    slides = name in ("mistral", "gemma2")
    model.config.sliding_window = 6 if slides else 64
    layers = model.config.num_hidden_layers
    kinds = (name == "gemma2" and model.config.layer_types) or ["sliding_attention"] * layers
    reach = np.array([6 if slides and kind == "sliding_attention" else 20 for kind in kinds])
    monkeypatch.setitem(
        EVICTIONS, "even", lambda read: 1.0 - torch.arange(20.0).expand(read.attention.key.shape[1], -1) % 2
    )
    plan = Plan("even", reach[:, None] // 2, np.full((layers, 2), 16), evicts="even")
    sizes, batch = Sizes(reach, 1, 1, 0), Batch(ids, torch.ones_like(ids))
    with open_seam(model, find_family(model)) as seams, attending_after_evictions({}, seams, [plan], batch, 20, sizes):
        mine = model(ids, use_cache=False).logits
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    seen = (key <= query) & ((query < 20) | (key >= 20) | (key % 2 == 0))
    hidden = {
        kind: torch.zeros(1, 1, *seen.shape).double().masked_fill(~(seen & (query - key < window)), -torch.inf)
        for kind, window in (("sliding_attention", model.config.sliding_window), ("full_attention", 64))
    }
    model.set_attn_implementation("eager")
    mask = hidden if name == "gemma2" else hidden["sliding_attention"]
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert float((mine - expected).abs().max() / expected.abs().max()) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])  # a mask, and sink logits of each sequence
def test_evictions_in_one_batch_are_those_of_a_batch_each(name: str) -> None:
    """Rows before theirs attend with plans that evict by windows."""
    model, ids = tiny_model(name, dtype=torch.float64, spread=6.0), tiny_tokens(1)
    layers = model.config.num_hidden_layers
    counts, bits = np.arange(4, 4 + layers)[:, None], np.full((layers, 2), 16)
    plans = [Plan(name, counts + nth, bits, evicts=name) for nth, name in enumerate(EVICTIONS)]
    sizes, batch, family = Sizes(np.full(layers, 20), 1, 1, 0), Batch(ids, torch.ones_like(ids)), find_family(model)
    modules = family.attentions(model)
    heads = model.config.num_key_value_heads
    windows = [
        Plan("", np.full((layers, heads), window), bits // ratio, served=served)
        for window, ratio, served in ((5, 1, ""), (9, 4, ""), (24, 2, "fp8"))
    ]
    sinks = [(0,), (2,), ()]
    with open_seam(model, family) as seams:
        with (
            attending_with_plans(seams, windows, sinks),
            attending_after_evictions(modules, seams, plans, batch, 20, sizes),
        ):
            together = model(ids.repeat(3 + len(plans), 1), use_cache=False).logits
        alone = []
        for plan, exact in zip(windows, sinks, strict=True):
            with attending_with_plans(seams, [plan], [exact]):
                alone.append(model(ids, use_cache=False).logits)
        for plan in plans:
            with attending_after_evictions(modules, seams, [plan], batch, 20, sizes):
                alone.append(model(ids, use_cache=False).logits)
    torch.testing.assert_close(together, torch.cat(alone))
    assert all(float((together[0] - row).abs().max()) > 1e-3 for row in together[1:])


@torch.no_grad()
def test_expected_attention_of_a_model_rotates_its_queries_to_later_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, ahead = tiny_model("llama", spread=6.0), tiny_tokens(1), list[torch.Tensor]()
    monkeypatch.setitem(
        EVICTIONS, EXPECTED, lambda read: ahead.append(read.ahead) or read.attention.value[0, :, :20, 0]
    )
    layers = model.config.num_hidden_layers
    plan = Plan("", np.full((layers, 1), 4), np.full((layers, 2), 16), evicts=EXPECTED)
    batch, family = Batch(ids, torch.ones_like(ids)), find_family(model)
    inputs = list[torch.Tensor]()
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    sizes = Sizes(np.full(layers, 20), 1, 1, 0)
    modules = family.attentions(model)
    with open_seam(model, family) as seams:
        with attending_after_evictions(modules, seams, [plan], batch, 20, sizes):
            model(ids, use_cache=False)
        nearest = Plan("", np.full((layers, 2), 1), np.full((layers, 2), 16))
        with (
            attending_with_plans(seams, [nearest], [()]),
            attending_after_evictions(modules, seams, [plan], batch, 20, sizes),
        ):
            model(ids.repeat(2, 1), use_cache=False)
    torch.testing.assert_close(ahead[layers:], ahead[:layers])  # those of the plan's row
    unrotated = attention.q_proj(inputs[0]).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    length = ids.shape[1]
    later = torch.arange(20, 20 + length)[None]  # as many as the text has
    cos, sin = (table.mean(1, keepdim=True) for table in model.model.rotary_emb(inputs[0], later))
    expected, _ = apply_rotary_pos_emb(unrotated, unrotated, cos, sin)
    torch.testing.assert_close(ahead[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("future", [eviction.FUTURE, 4])
def test_mean_rotation_of_complex_tables(future: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "FUTURE", future)
    angles = torch.arange(12.0)[None, :, None] * torch.tensor([1.0, 0.1])
    pair = mean_rotation((1.5 * angles.cos(), 1.5 * angles.sin()), 8)
    of_complex = mean_rotation(torch.polar(torch.full_like(angles, 1.5), angles), 8)
    expected = 1.5 * torch.exp(1j * torch.arange(8, 8 + min(12, future))[:, None] * torch.tensor([1.0, 0.1])).mean(0)
    for mean in (torch.complex(*pair), of_complex):
        torch.testing.assert_close(mean, expected.expand(1, 12, 2), atol=1e-6, rtol=1e-5)


def test_questions_are_early_and_the_key_ends_the_prompt() -> None:
    texts = [np.random.default_rng(seed).integers(3, 3000, 128) for seed in range(4)]
    questions = questions_of(texts, seed=0)
    assert questions_of(texts, seed=0)[5].ids.tolist() == questions[5].ids.tolist()
    for number, question in enumerate(questions):
        text, ids = texts[number % 4], question.ids
        assert len(ids) == 128 + VALUE
        assert ids[:4].tolist() == text[:4].tolist()
        assert question.first + VALUE <= 4 + 64
        asked = ids[question.first - KEY : question.first + VALUE]
        assert ids[128 - KEY :].tolist() == asked.tolist()
        written = (ids[: 128 - KEY] != text[: 128 - KEY]).sum()
        assert 0.9 < written / ((KEY + VALUE) * (1 if number < 4 else 8)) <= 1
        of_prompt, of_value, before = (ids[1:][part] for part in question.parts)
        assert of_prompt.tolist() == ids[1:128].tolist()
        assert of_value.tolist() == before.tolist() == ids[128:].tolist()
    text = np.array([1, *[7, 8] * 64])  # a BOS is not drawn
    assert all(set(question.ids[1:]) == {7, 8} for question in questions_of([text], seed=0))
    copy = CopiedText.of(texts[0])
    _, after, before = (copy.ids[1:][part] for part in copy.parts)
    assert after.tolist() == before.tolist() == texts[0][9:17].tolist()


def test_windows_after_the_prompt_are_of_what_a_layer_sees() -> None:
    study = object.__new__(studies.PlanStudy)
    vars(study).update(sizes=Sizes(np.array([100, 41]), 2, 16, 1))
    for door, positions, names in (
        ("interface", "rotary", [*EVICTIONS]), ("interceptor", "learned", [*EVICTIONS]),
        ("interceptor", "rotary", ["snapkv", "tova"]),
    ):  # fmt: skip
        vars(study)["subject"] = SimpleNamespace(family=SimpleNamespace(door=door, kinds_of_positions={positions}))
        plans = study._evictions(0.25)
        assert [plan.evicts for plan in plans] == names
        for plan in plans:
            assert plan.windows.tolist() == [[25, 25], [10, 10]]
            assert study.sizes.memory(plan) == pytest.approx(70 / 282)


@pytest.mark.parametrize(("dense", "kept"), [([0.8, 0.6], 0.5), ([0.4, 0.6], 0.7), ([0.4, 0.59], float("nan"))])
def test_what_is_kept_is_a_share_of_what_the_dense_cache_retrieves(dense: list[float], kept: float) -> None:
    study, plan = object.__new__(studies.PlanStudy), Plan("", np.zeros(1), np.zeros(1))
    retrieval = [np.array(x) for x in (dense, [0.4, 0.3], [0.2, 0.1])]
    costs = [PlanCost(*np.full((2, 2), [[9.0], [2.0]]), each, each / 10) for each in retrieval]
    vars(study).update(
        tasks={"copy": ()}, measured=(), retrievals=[],
        sizes=SimpleNamespace(memory=lambda plan: 0.25), _read=lambda *_: costs,
        _inputs=lambda _: SimpleNamespace(texts=(0, 1)),
    )  # fmt: skip
    study._note_tasks(0.25, [plan] * 3)
    row = study.retrievals[1]
    assert row["kept"] == pytest.approx(kept, nan_ok=True)
    assert (row["memory"], row["loss"]) == (0.25, 2.0)
    assert (row["retrieval"], row["guessed"]) == pytest.approx((0.35, 0.035))
