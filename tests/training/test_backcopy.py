"""The task's blocks as `train` reads them, alone and mixed with text."""

import numpy as np

from sinkscope.text.sources import documents
from sinkscope.training.tasks import TASKS, Task
from sinkscope.training.tasks.backcopy import NAME, Opening

LENGTH = 40


def follows_the_chain(task: Task, block: np.ndarray) -> bool:
    """By the rule of triggers: behind one comes what stood before it."""
    trigger = task.chain.is_trigger(block[1:-1])  # type: ignore[attr-defined]
    return bool((block[2:] == block[:-2])[trigger].all())


def test_every_second_block_is_a_passage_of_the_text() -> None:
    task, alone = TASKS[f"{NAME}-with-text"](), TASKS[NAME]()
    mixed, plain = (each.blocks(LENGTH, 9, 6, seed=3) for each in (task, alone))
    assert (mixed.train[::2] == plain.train[::2]).all()
    assert (mixed.held_out == plain.held_out).all()
    text = task.tokenizer.decode(
        task.tokenizer("".join(documents("natural")[1]), add_special_tokens=False)["input_ids"]
    )
    passages = [task.tokenizer.decode(block[1:]) for block in mixed.train[1::2]]
    assert (mixed.train[:, 0] == task.chain.start).all()
    assert len(set(passages)) == 4
    assert all(len(passage) == LENGTH - 1 and passage in text for passage in passages)
    assert all(follows_the_chain(task, block) for block in mixed.train[::2])
    assert not any(follows_the_chain(task, block) for block in mixed.train[1::2])


def test_passages_without_a_bos_are_as_long_as_blocks() -> None:
    task = TASKS[f"{NAME}-with-text"](Opening(bos=False))
    text = task.tokenizer("".join(documents("natural")[1]), add_special_tokens=False)["input_ids"]
    blocks = task.blocks(LENGTH, 9, 6, seed=3)
    known = task.tokenizer.decode(text)
    assert all(task.tokenizer.decode(block) in known for block in blocks.train[1::2])
    assert all(follows_the_chain(task, block) for block in (*blocks.train[::2], *blocks.held_out))
    assert not (blocks.train == task.chain.start).any()  # type: ignore[attr-defined]


def test_passages_stand_behind_the_same_opening() -> None:
    task = TASKS[f"{NAME}-with-text"](Opening(fixed_position=2))
    text = task.tokenizer("".join(documents("natural")[1]), add_special_tokens=False)["input_ids"]
    known = task.tokenizer.decode(text)
    blocks = task.blocks(LENGTH, 9, 6, seed=3)
    assert (blocks.train[:, 2] == task.chain.start).all()  # type: ignore[attr-defined]
    assert all(task.tokenizer.decode(block[3:]) in known for block in blocks.train[1::2])


def test_its_passages_are_drawn_by_the_seed() -> None:
    task = TASKS[f"{NAME}-with-text"]()
    first, again, other = (task.blocks(LENGTH, 8, 2, seed).train[1::2] for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
