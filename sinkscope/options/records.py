"""Records: what a line of JSON, a row of a dataset or of a DataFrame, or an object in Python gives a model to read.

Token ids that are padded or packed become their sequences: `attention_mask` excludes padding, and a row that holds
several sequences (by restarting `position_ids`, by `seq_lengths`, or by an `attention_mask` that numbers them) is
split. A row whose sequences cannot be told apart is refused.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from sinkscope.errors import InputError, counted
from sinkscope.options.files import wrong_entry

ENTRIES = ("input_ids", "messages", "text")  # the first that a record has is read
LAYOUT = ("attention_mask", "position_ids", "seq_lengths")  # which of the `input_ids` are a sequence
OTHER_LAYOUTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # where sequences of a batch begin, for kernels


@dataclass(frozen=True)
class Document:
    """One document of a source: its text, its chat, or token ids that are used as they are."""

    where: str  # its name in error messages, such as "notes.jsonl, line 3"
    text: str = ""
    ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None  # a chat: role and content of each turn
    notice: str = ""  # a notice if the user requested more than one sequence
    entry: str = ""  # the entry or column that it is from
    is_part: bool = False  # whether it is a part of a packed row

    @property
    def is_text(self) -> bool:
        return self.ids is None and self.messages is None


def _of_characters(text: str) -> str:
    """Return the text; raise ValueError for half of a surrogate pair, which JSON can spell but no tokenizer accepts."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise ValueError(f"it should be text without \\u{ord(half[0]):04x}, which is not a character")
    return text


Text = Annotated[str, AfterValidator(_of_characters)]


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Text
    content: Text


class Record(BaseModel):
    """One record; it may have other entries. An entry that is null counts as missing."""

    model_config = ConfigDict(strict=True)  # 6.0 and true are not token ids

    input_ids: list[int] = []
    messages: list[Message] = []
    text: Text = ""
    attention_mask: list[int] = []
    position_ids: list[int] = []
    seq_lengths: list[int] = []


def documents_of(record: Mapping[str, Any], where: str, column: str = "") -> list[Document]:
    """Return the documents of a record: one, or the parts of a packed row. `where` begins the messages of errors.

    A record whose text is null is an empty document. The text is in `column` if the record has none of ENTRIES.
    """
    if column:
        record = {"text": record.get(column)}
    present = [name for name in ENTRIES if name in record]
    if not present:
        raise InputError(f"{where}: a record needs `text`, `messages` or `input_ids`; this one has {keys(record)}")
    entry = next((name for name in present if record[name] is not None), present[0])
    wanted = {name: record[name] for name in Record.model_fields if record.get(name) is not None}
    if entry == "input_ids":  # a chat is not needed then, and a text only for training
        other = next((name for name in OTHER_LAYOUTS if record.get(name) is not None), None)
        if other and not {"position_ids", "seq_lengths"} & wanted.keys():
            what = f"`{other}` says where sequences begin"
            raise InputError(f"{where}: {what}: give `position_ids` or `seq_lengths` instead")
        wanted = {name: value for name, value in wanted.items() if name in (entry, *LAYOUT) or isinstance(value, str)}
        mask = wanted.get("attention_mask")
        if isinstance(mask, list):
            wanted["attention_mask"] = [int(seen) if isinstance(seen, bool) else seen for seen in mask]
    else:
        wanted = {name: value for name, value in wanted.items() if name not in LAYOUT}
    try:
        checked = Record.model_validate(wanted)
    except ValidationError as error:
        form = "`text` is a string, `input_ids` are integers, and each of `messages` has a `role` and a `content`"
        raise InputError(f"{where}: {wrong_entry(error)}: {form}") from None
    entry = column or entry
    if "input_ids" not in wanted:
        messages = [message.model_dump() for message in checked.messages] or None
        return [Document(where, checked.text, None, messages, entry=entry)]
    parts = _sequences(checked, wanted.keys(), where)
    if len(parts) == 1:
        return [Document(where, checked.text, parts[0], entry=entry)]
    return [
        Document(f"{where}, part {number}", checked.text, ids, entry=entry, is_part=True)
        for number, ids in enumerate(parts, 1)
    ]


def _sequences(record: Record, entries: Collection[str], where: str) -> list[list[int]]:
    """Return the sequences in the ids of a record, by those of LAYOUT that are among its `entries`."""
    ids, mask, positions, lengths = record.input_ids, record.attention_mask, record.position_ids, record.seq_lengths
    for name, values in (("attention_mask", mask), ("position_ids", positions)):
        if name in entries and len(values) != len(ids):
            raise InputError(f"{where}: `{name}` has {counted(len(values), 'number')} for {len(ids)} `input_ids`")
    mask = mask if "attention_mask" in entries else [1] * len(ids)
    seen = [index for index, is_seen in enumerate(mask) if is_seen]
    if not seen:
        return [[]]
    first, end = seen[0], seen[-1] + 1
    if end - first > len(seen):
        raise InputError(f"{where}: `attention_mask` hides tokens between others: give each sequence by itself")
    starts = {first, *(index for index in range(first + 1, end) if mask[index] != mask[index - 1])}
    if "seq_lengths" in entries:
        if min(lengths, default=0) < 1 or sum(lengths) not in (len(ids), len(seen)):
            raise InputError(f"{where}: `seq_lengths` do not add up to its {len(ids)} `input_ids`")
        before = first if sum(lengths) == len(seen) else 0
        starts |= {before + total for total in accumulate(lengths) if first < before + total < end}
    if "position_ids" in entries:
        starts |= {index for index in range(first + 1, end) if positions[index] != positions[index - 1] + 1}
        for start in sorted(starts):
            if positions[start] != 0:
                raise InputError(
                    f"{where}: `position_ids` go on with {positions[start]} at token {start}, where a sequence begins: "
                    "only sequences from position 0 on are measured"
                )
    return [ids[start:stop] for start, stop in pairwise([*sorted(starts), end])]


def keys(record: Mapping[str, Any]) -> str:
    """Return the names of a record's entries, at most six, for an error message."""
    shown = ", ".join(map(str, islice(record, 6))) + (", …" if len(record) > 6 else "")
    return shown or "nothing"
