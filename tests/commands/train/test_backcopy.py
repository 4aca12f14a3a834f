"""The Bigram-Backcopy task: its rules, its characters, and its blocks, also mixed with text."""

import numpy as np
import pytest

from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.tasks import TASKS, TrainingTask
from sinkscope.commands.train.tasks.backcopy import NAME, BackcopyTask, Chain, Opening, chain_of
from sinkscope.text.sources import documents

# <s>, two triggers, three other characters
SMALL = Chain(
    ("<s>", "e", "t", "a", "b", "c"),
    np.array([
        [0, 0, 0, 0.5, 0.3, 0.2], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0],
        [0, 0.2, 0.1, 0.3, 0.4, 0], [0, 0.5, 0, 0, 0.25, 0.25], [0, 0, 0.4, 0.6, 0, 0],
    ]),
    triggers=(1, 2),
)  # fmt: skip


def small(opening: Opening, *sizes: int) -> Blocks:
    return BackcopyTask(opening, SMALL).blocks(*sizes, seed=3)


def test_samples_follow_the_rules_with_the_frequencies_of_the_chain() -> None:
    ids = SMALL.sample(20000, 12, seed=1)
    assert ids.dtype == np.int64
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:] != 0).all()
    assert not SMALL.is_trigger(ids[:, 1]).any()
    after = SMALL.is_trigger(ids[:, 1:-1])
    assert (ids[:, 2:] == ids[:, :-2])[after].all()
    assert not SMALL.is_trigger(ids[:, :-2])[after].any()  # a copied token is not a trigger
    for last in (0, 3, 4, 5):
        following = ids[:, 1:][ids[:, :-1] == last]
        shares = np.bincount(following, minlength=6) / len(following)
        error = np.sqrt(SMALL.transitions[last] * (1 - SMALL.transitions[last]) / len(following))
        assert (np.abs(shares - SMALL.transitions[last]) <= 5 * error).all()


def test_without_a_bos_the_first_character_is_first_and_at_position_0_a_fixed_start_is_the_bos() -> None:
    with_it, without = small(Opening(), 20, 6, 4), small(Opening(bos=False), 19, 6, 4)
    assert small(Opening(bos=False, fixed_position=0), 20, 6, 4).sha256 == with_it.sha256
    for with_bos, without_bos in ((with_it.train, without.train), (with_it.held_out, without.held_out)):
        assert np.array_equal(with_bos[:, 1:], without_bos)
    assert not SMALL.is_trigger(without.train[:, 0]).any()


@pytest.mark.parametrize("bos", [True, False])
def test_a_start_at_a_fixed_position_stands_between_two_chains(bos: bool) -> None:
    opening = Opening(bos=bos, fixed_position=5)
    assert opening.length == 6
    blocks = small(opening, 20, 600, 400)
    for ids, part in ((blocks.train, 0), (blocks.held_out, 1)):
        assert (ids[:, 5] == 0).all()
        assert (ids[:, 0] == 0).all() == bos
        assert (ids[:, 1:5] != 0).all()
        assert np.array_equal(ids[:, 5:], SMALL.sample(len(ids), 15, [3, part]))  # as without an opening
        after = SMALL.is_trigger(ids[:, 1:4])
        assert (ids[:, 2:5] == ids[:, :3])[after].all()
        assert 0 < (ids[:, 6:9] == ids[:, 1:4]).mean() < 0.5  # drawn independently of the tokens in front


@pytest.mark.parametrize("count", [1, 2])
def test_random_tokens_are_all_characters_and_nothing_follows_from_them(count: int) -> None:
    opening = Opening(random_tokens=count)
    assert opening.length == count
    ids = small(opening, 20, 4000, 400).train
    shares = np.bincount(ids[:, :count].ravel(), minlength=6) / (4000 * count)
    assert shares[0] == 0
    assert shares[1:] == pytest.approx([0.2] * 5, abs=0.03)  # triggers, too
    assert np.array_equal(ids[:, count:], SMALL.sample(4000, 20 - count, [3, 0], bos=False))


def test_the_chain_is_that_of_the_text() -> None:
    task = chain_of("aabbbbccccc ddd" + "eee")  # c, b, then d and e: before a and the space
    assert task.tokens == ("<s>", "c", "b", "d", "e", "a", " ")
    a, e, space = task.tokens.index("a"), task.tokens.index("e"), task.tokens.index(" ")
    assert task.transitions[a, a] == 0.5
    assert task.transitions[a, task.tokens.index("b")] == 0.5
    assert task.transitions[space, task.tokens.index("d")] == 1
    assert task.transitions[e, e] == 1
    assert task.transitions[0].tolist() == pytest.approx([0, 0, 0, 0, 3 / 6, 2 / 6, 1 / 6])
    assert (task.transitions[list(task.triggers)] == 0).all()


def test_the_tokenizer_knows_the_characters_and_puts_the_start_in_front(tmp_path: object) -> None:
    task = BackcopyTask()
    tokenizer, tokens = task.tokenizer, task.chain.tokens
    tokenizer.save_pretrained(str(tmp_path))
    for known in (tokenizer, type(tokenizer).from_pretrained(str(tmp_path))):
        assert len(known) == len(tokens)
        ids = known("the end.\n€x").input_ids  # no € among the characters
        assert [tokens[index] for index in ids] == ["<s>", *"the end.\n", "x"]
        assert known.decode(ids[1:]) == "the end.\nx"
        assert known.bos_token_id == 0


LENGTH = 40


def follows_the_chain(task: TrainingTask, block: np.ndarray) -> bool:
    """Return whether the token before a trigger is repeated after it."""
    trigger = task.chain.is_trigger(block[1:-1])  # type: ignore[attr-defined]
    return bool((block[2:] == block[:-2])[trigger].all())


@pytest.mark.slow
@pytest.mark.parametrize("opening", [Opening(), Opening(bos=False), Opening(fixed_position=2)])
def test_every_second_block_is_a_passage_of_the_text(opening: Opening) -> None:
    task, alone = TASKS[f"{NAME}-with-text"](opening), TASKS[NAME](opening)
    mixed, plain = (each.blocks(LENGTH, 9, 6, seed=3) for each in (task, alone))
    assert (mixed.train[::2] == plain.train[::2]).all()
    assert (mixed.held_out == plain.held_out).all()
    whole = "".join(documents("natural")[1])
    text = task.tokenizer.decode(task.tokenizer(whole, add_special_tokens=False)["input_ids"])
    passages = [task.tokenizer.decode(block[opening.length :]) for block in mixed.train[1::2]]
    starts = mixed.train == 0
    assert starts[:, opening.length - 1].all() if opening.length else not starts.any()
    assert len(set(passages)) == 4
    assert all(len(passage) == LENGTH - opening.length and passage in text for passage in passages)
    after_the_opening = slice(opening.in_front, None)
    assert all(follows_the_chain(task, block[after_the_opening]) for block in mixed.train[::2])
    assert not any(follows_the_chain(task, block[after_the_opening]) for block in mixed.train[1::2])
    assert mixed.sha256 == task.blocks(LENGTH, 9, 6, 3).sha256 != task.blocks(LENGTH, 9, 6, 4).sha256
