"""A tokenizer made from the text itself: byte-level BPE, as GPT-2's, with a BOS in front, as Llama's."""

from collections.abc import Iterable, Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2
MOST_DOCUMENTS = 100_000  # so that it does not read a corpus to its end
MOST_CHARACTERS = 1 << 26


def tokenizer_of(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens, 256 bytes and three special ones among them.

    A short text gives fewer tokens; the same text gives the same tokenizer.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_beginning(documents), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _beginning(documents: Iterable[str]) -> Iterator[str]:
    left = MOST_CHARACTERS
    for document in islice(documents, MOST_DOCUMENTS):
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return
