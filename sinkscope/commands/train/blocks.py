"""The text that a model is trained on, packed into blocks of one length.

The last blocks are held out for measuring; the first ones of a dataset, which is read no further than needed.

Documents follow one another with the end-of-sequence token between them. Every block begins like a measured sequence,
with the tokens that the tokenizer puts before a text, and for an encoder ends with those after it; its first tokens can
be random or fixed (WSE §4 and §5).
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.train.options import ArmOptions
from sinkscope.commands.train.sharding import is_sharded
from sinkscope.errors import InputError, counted
from sinkscope.measuring.subject import inputs_for, position_limit
from sinkscope.models.family import Family, vocabulary
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config
from sinkscope.text.sources import TEXTS, check_source, documents
from sinkscope.text.tokens import check_ids, encode, own_frame, special_token_ids

ROWS = 1 << 12  # blocks that are hashed at a time
PIECE = 1 << 20  # characters that are tokenized in one call
DOCUMENTS = (".txt", ".jsonl", ".json")
NO_TEXT = ("random", "repeated")
MANY_PASSES = 4  # fewer are about as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Token ids `train` and `held_out`, (N,T) of whole numbers, and the `name` of the text."""

    train: np.ndarray
    held_out: np.ndarray
    name: str
    masked_by: PreTrainedTokenizerBase | None = None  # an encoder's, which predicts masked tokens; None: the next token

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(np.array(part.shape).astype("<i8").tobytes())
            for start in range(0, len(part), ROWS):  # a copy of all tokens may be larger than the memory
                digest.update(part[start : start + ROWS].astype("<i8").tobytes())
        return digest.hexdigest()

    def notices(self, wanted: int) -> list[str]:
        """Return warnings for a training that reads `wanted` blocks, one line each."""
        passes = wanted / len(self.train)
        if passes <= MANY_PASSES:
            return []
        return [
            f"these steps are {passes:,.0f} passes over the {self.train.size:,} tokens of {self.name}, which the model "
            "will learn by heart: give a longer --text, a --dataset or fewer --steps"
        ]


def check_options(options: ArmOptions, task: str | None) -> None:
    """Raise InputError for a text that cannot be trained on, or contradicting options, before a model is loaded."""
    text, length = options.text, options.block_length
    if options.probe and is_sharded():
        raise InputError("--probe needs the whole model, and FSDP shards it: leave it out, or launch without FSDP")
    if task is None and text in NO_TEXT:
        raise InputError(f"--text {text}: nothing can be learned from it; name a text file or a --dataset")
    if task is None:
        try:
            check_source(text)
        except InputError as error:
            raise InputError(str(error).replace("--input", "--text")) from None
    elif options.random_tokens and options.fixed_position is not None:
        raise InputError(f"--text {task}: give one of --random-tokens and --fixed-position")
    if options.random_tokens >= length or (options.fixed_position or 0) >= length:
        raise InputError(f"--random-tokens and --fixed-position are within the --block-length of {length} tokens")
    if options.tokens is not None and options.tokens < length:
        raise InputError(f"--tokens {options.tokens} are less than one block of {length}")


def is_written(text: str, dataset: str | None) -> bool:
    """Return whether a source is text for a tokenizer, rather than token ids or text sampled by the model."""
    return dataset is not None or text in TEXTS or Path(text).suffix.lower() in DOCUMENTS


def read_blocks(loaded: LoadedModel, options: ArmOptions, wanted: int, family: Family | None = None) -> Blocks:
    """Read the text of a training in blocks, and no more of it than is needed for `wanted` blocks to train on.

    Without a family, the model is taken as causal.
    """
    is_causal, length = family is None or family.causal, options.block_length
    measured = max(1, math.ceil(wanted * options.eval_share / (1 - options.eval_share)))
    trained = min(wanted, options.tokens // length) if options.dataset and options.tokens else wanted
    needed = trained + measured
    if is_written(options.text, options.dataset):
        tokenizer = loaded.tokenizer
        if tokenizer is None:
            raise InputError("training on text needs a tokenizer, and this model has none: give token ids (.npy)")
        limit = position_limit(loaded.model, family)
        if limit and length > limit:
            raise InputError(f"--block-length {length} is beyond the model's {limit} positions: take at most {limit}")
        prefix, suffix = ((), ()) if options.bos == "never" else own_frame(tokenizer)
        suffix = () if is_causal else suffix
        step = length - len(prefix) - len(suffix)
        if step < 1:
            raise InputError(f"--block-length {length}: {length - step} tokens of every block are not the text's")
        name, texts = documents(options.text, options.dataset)
        vocab_size = vocabulary(loaded.model)
        dtype = np.min_scalar_type(vocab_size)  # billions of tokens fit into memory in 16 bits each
        stream = _tokens_of(tokenizer, name, texts, prefix, vocab_size)
        parts = (np.fromiter(islice(stream, step), dtype=dtype) for _ in range(needed))
        complete = takewhile(lambda part: len(part) == step, parts)
        rows = [np.array((*prefix, *part, *suffix), dtype=dtype) for part in complete]
    else:
        sizes = {"seq_len": length, "num_seqs": needed, "seed": options.seed, "bos": options.bos}
        inputs = inputs_for(loaded, make_config(input=options.text, **sizes), family)
        name, rows = inputs.condition, list(inputs.sequences)
    if len(rows) < 2:
        what = f"--dataset {options.dataset}" if options.dataset else f"--text {options.text}"
        raise InputError(
            f"{what} holds {counted(len(rows), 'block')} of {length} tokens, and at least 2 are needed, one to train "
            "on and one to measure: give a longer text or a smaller --block-length"
        )
    blocks = np.stack(rows)
    if options.dataset:  # the first ones are the same for every --tokens
        measured = min(len(blocks) - 1, measured)
        train, held_out = blocks[measured:], blocks[:measured]
    else:
        measured = min(len(blocks) - 1, max(1, round(len(blocks) * options.eval_share)))
        train, held_out = blocks[:-measured], blocks[-measured:]
    return Blocks(train, held_out.astype(np.int64), name, None if is_causal else loaded.tokenizer)


def _tokens_of(
    tokenizer: PreTrainedTokenizerBase, name: str, texts: Iterable[str], prefix: Collection[int], known: int
) -> Iterator[int]:
    """Yield the token ids of documents with an end-of-sequence token between them, without a document's own prefix."""
    ends = (tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None))
    between = next((end for end in ends if end is not None), None)
    for document in texts:
        start = 0
        while start < len(document):
            end = len(document)
            if end - start > PIECE:  # split after a line end, which hardly any tokenizer merges with the next line
                end = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
            ids = encode(tokenizer, document[start:end], special=False)
            if start == 0 and prefix and ids[: len(prefix)] == [*prefix]:
                ids = ids[len(prefix) :]  # every block begins with them
            check_ids(ids, known, f"{name} through this tokenizer")
            yield from ids
            start = end
        if between is not None:
            yield between


def limited(blocks: Blocks, options: ArmOptions) -> Blocks:
    """Limit the blocks to train on to --tokens; the held-out blocks stay the same for every limit."""
    if options.tokens is None:
        return blocks
    return replace(blocks, train=blocks.train[: options.tokens // options.block_length])


def with_first_tokens(blocks: Blocks, loaded: LoadedModel, options: ArmOptions) -> Blocks:
    """Replace the first tokens of each block by --random-tokens, or one by --fixed-position; tasks use `Opening`.

    Random tokens are drawn uniformly from the vocabulary without special tokens. The fixed token is the BOS, or else
    the padding token; with `--bos never` it occurs nowhere else, unless the tokenizer ends documents with it, too.
    """
    train, held_out = blocks.train.copy(), blocks.held_out.copy()
    known = (getattr(loaded.tokenizer, name, None) for name in ("bos_token_id", "pad_token_id"))
    fixed = next((token for token in known if token is not None), 0)
    ordinary = np.setdiff1d(np.arange(vocabulary(loaded.model)), list(special_token_ids(loaded.tokenizer)))
    rng, count = np.random.default_rng([options.seed, options.random_tokens]), options.random_tokens
    for part in (held_out, train):  # in this order the held-out tokens do not depend on --tokens
        if count:
            part[:, :count] = rng.choice(ordinary, (len(part), count))
        if options.fixed_position is not None:
            part[:, options.fixed_position] = fixed
    return replace(blocks, train=train, held_out=held_out)
