"""Tiny random models of pictures and text with their processors, saved as folders, and pictures to show them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import spread_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaProcessor,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

from support.every_model import tiny_config

SIDE, PATCH = 16, 4  # pixels: a picture has 16 patches
SEEING = ("llava", "gemma3", "paligemma", "idefics3")
IMAGE, BEGIN, END, FAKE, GLOBAL = "<image>", "<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>"
MARKS = ("<pad>", "<s>", "</s>", "<unk>", IMAGE, BEGIN, END, FAKE, GLOBAL, "<end_of_utterance>")
MARKS += tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
VOCAB = 160
SIZE = {"height": SIDE, "width": SIDE}
SIGLIP = {"size": SIZE, "image_seq_length": 16}


def tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters."""
    letters = [*MARKS, *"Describe this image.\nUsr:Atn, ", "\n\n"]
    core = Tokenizer(models.WordLevel({name: at for at, name in enumerate(dict.fromkeys(letters))}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens(list(MARKS))
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    extra = {
        "image_token": IMAGE,
        "boi_token": BEGIN,
        "eoi_token": END,
        "fake_image_token": FAKE,
        "global_image_token": GLOBAL,
    }
    return PreTrainedTokenizerFast(tokenizer_object=core, **special, extra_special_tokens=extra, **more)


def processor(kind: str) -> Any:
    text = tokenizer()
    if kind == "llava":
        size = {"crop_size": SIZE, "size": {"shortest_edge": SIDE}}
        return LlavaProcessor(CLIPImageProcessorPil(**size), text, PATCH, "default", num_additional_image_tokens=1)
    if kind == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(size=SIZE), text, image_seq_length=4)
    if kind == "paligemma":
        images = SiglipImageProcessorPil(**SIGLIP)
        return PaliGemmaProcessor(images, text)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return Idefics3Processor(images, text, image_seq_len=4)


def seeing(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny random model of pictures and text, in eval mode."""
    config: Any = tiny_config(kind)
    config.image_token_id = config.image_token_index = MARKS.index(IMAGE)
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = VOCAB, 0
    vision = config.vision_config
    vision.image_size, vision.patch_size, vision.projection_dim = SIDE, PATCH, text.hidden_size
    if kind == "gemma3":
        config.mm_tokens_per_image, config.boi_token_index, config.eoi_token_index = 4, 5, 6
    if kind == "paligemma":
        config.projection_dim = text.hidden_size
    if kind == "idefics3":
        config.scale_factor = 2
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False).to(dtype)
    spread_weights(model, 6.0)
    return model


def save(kind: str, folder: Path, model: Any = None) -> Path:
    """Save a model with its processor."""
    (seeing(kind) if model is None else model).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return folder


def draw_pictures(folder: Path, count: int = 2, side: int = SIDE) -> Path:
    """Write noise as PNG files."""
    folder.mkdir(exist_ok=True)
    noise = np.random.default_rng(0)
    for at in range(count):
        Image.fromarray(noise.integers(0, 256, (side, side, 3), np.uint8)).save(folder / f"{at}.png")
    return folder
