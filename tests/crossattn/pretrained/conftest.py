"""Small BLIPs with really random weights: 12 heads as the published ones have, and answers that are not nearly tied."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.crossattn import ImageQA
from regard.vit.errors import InputError

sys.path.append(str(Path(__file__).parent))  # tests import `small_bert.py`, which lies here
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXT = """what is the color of dog cat car tree left right red blue green how many are there in a it asleep does not run
who u s t ' ? , - ##s ##ing ##ed 1 2 3 0 yes no one two night sky old house near large man woman on table : . !"""
PIECES = (*SPECIAL, *TEXT.split())


@pytest.fixture(scope="session")
def pieces() -> tuple[str, ...]:
    """The pieces of `vocab.txt`; [DEC] and [ENC] come behind them."""
    return PIECES


@pytest.fixture(scope="session")
def fill() -> Callable[..., nn.Module]:
    """Noise on every parameter; `end` is added to the score of [SEP], so that some answers end and others do not."""

    def filled(module: nn.Module, seed: int = 0, end: float = 0.0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "embedding" in name and "patch" not in name and "LayerNorm" not in name:
                    # Scores are of the same size for any width: they are sums over it.
                    parameter.copy_((10.0 if "position" in name else 5.0) * noise * parameter.shape[-1] ** -0.5)
                elif parameter.dim() >= 2:
                    sharp = 2.0 if ".query." in name or ".key." in name else 1.5
                    parameter.copy_(sharp * noise * parameter.shape[1:].numel() ** -0.5)
                elif "norm" in name.lower() and name.endswith("weight"):
                    parameter.copy_(1 + 0.2 * noise)
                else:
                    parameter.copy_(0.3 * noise)
                if "crossattention.self.value" in name or "crossattention.output.dense" in name:
                    parameter.mul_(0.5)  # what an answer has written so far weighs as much as the question
            if end:
                head = module.text_decoder.cls.predictions  # type: ignore[union-attr]
                for bias in {id(bias): bias for bias in (head.bias, head.decoder.bias)}.values():  # type: ignore
                    bias[PIECES.index("[SEP]")] += end
        return module.eval()

    return filled


@pytest.fixture(scope="session")
def make_blip(fill) -> Callable[..., Any]:
    """transformers' model: 12 heads on both sides, by default 64 px in 4 x 4 patches."""
    transformers = pytest.importorskip("transformers")

    def make(seed: int = 0, *, width: int = 96, heads: int = 12, tied: bool = True, image_size: int = 64) -> Any:
        config = transformers.BlipConfig(
            text_config=dict(
                vocab_size=len(PIECES) + 2,
                hidden_size=width,
                encoder_hidden_size=width,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=heads,
                max_position_embeddings=48,
                bos_token_id=len(PIECES),
                sep_token_id=PIECES.index("[SEP]"),
                tie_word_embeddings=tied,
            ),
            vision_config=dict(
                hidden_size=width,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=heads,
                image_size=image_size,
            ),
            tie_word_embeddings=tied,
        )
        return fill(transformers.BlipForQuestionAnswering(config), seed, end=3.0 if tied else 4.0)

    return make


@pytest.fixture(scope="session")
def blip(make_blip) -> Any:
    """One of them, which nobody may change."""
    return make_blip()


@pytest.fixture(scope="session")
def save() -> Callable[[Any, Path], Path]:
    """A folder as transformers writes it, with `vocab.txt`."""

    def written(model: Any, folder: Path, pieces: Sequence[str] = PIECES) -> Path:
        model.save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        return folder

    return written


@pytest.fixture(scope="session")
def folder(blip, save, tmp_path_factory) -> Path:
    """The one as a folder."""
    return save(blip, tmp_path_factory.mktemp("blip") / "tiny-blip")


# The authors' names, from transformers': image side only, the text side is the same in both.
_AUTHORS = (
    (r"^vision_model\.embeddings\.class_embedding$", "visual_encoder.cls_token"),
    (r"^vision_model\.embeddings\.position_embedding$", "visual_encoder.pos_embed"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual_encoder.patch_embed.proj."),
    (r"^vision_model\.encoder\.layers\.", "visual_encoder.blocks."),
    (r"^vision_model\.post_layernorm\.", "visual_encoder.norm."),
    (r"\.self_attn\.qkv\.", ".attn.qkv."),
    (r"\.self_attn\.projection\.", ".attn.proj."),
    (r"\.layer_norm([12])\.", r".norm\1."),
)


@pytest.fixture(scope="session")
def as_authors() -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A state of transformers' under the names that the authors' file has, their counted places included."""

    def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {}
        for name, tensor in state.items():
            for pattern, other in _AUTHORS:
                name = re.sub(pattern, other, name) if name.startswith(("vision_model", "visual_encoder")) else name
            tensors[name] = tensor.clone()
        places = torch.arange(48)[None]
        return tensors | {f"{side}.embeddings.position_ids": places for side in ("text_encoder", "text_decoder.bert")}

    return renamed


@pytest.fixture(scope="session")
def questions_of() -> Callable[..., tuple[Tensor, Tensor]]:
    """Random questions from [CLS] to [SEP] of unequal lengths, padded: ids and mask `(Q, T)`."""

    def make(seed: int, count: int, longest: int = 14, words: int = len(PIECES)) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        ids = torch.zeros(count, max(lengths) + 2, dtype=torch.long)
        for row, length in zip(ids, lengths, strict=True):
            inner = torch.randint(len(SPECIAL), words, (length,), generator=generator)
            row[: length + 2] = torch.tensor([PIECES.index("[CLS]"), *inner.tolist(), PIECES.index("[SEP]")])
        mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None] + 2
        return ids, mask

    return make


@pytest.fixture(scope="session")
def images_of() -> Callable[..., Tensor]:
    """Random preprocessed images `(B, 3, height, width)`."""
    return lambda seed, count, height=64, width=64: torch.randn(
        count, 3, height, width, generator=torch.Generator().manual_seed(seed)
    )


# What several files of tests open, and spoil


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A folder of its own for each test to spoil."""
    place = tmp_path / "copy"
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.fixture(scope="session")
def narrow(make_blip) -> Any:
    """Two heads of 64: the authors' file states no number of heads."""
    return make_blip(width=128, heads=2)


@pytest.fixture
def authors(narrow, as_authors, save, tmp_path) -> Path:
    """The authors' file with a vocabulary beside it, and no configuration."""
    (tmp_path / "authors").mkdir()
    torch.save({"model": as_authors(narrow.state_dict())}, tmp_path / "authors" / "model_vqa.pth")
    vocabulary = save(narrow, tmp_path / "theirs") / "vocab.txt"
    (tmp_path / "authors" / "vocab.txt").write_bytes(vocabulary.read_bytes())
    return tmp_path / "authors" / "model_vqa.pth"


@pytest.fixture(scope="session")
def rewritten() -> Callable[..., Path]:
    """A folder with its tensors changed in place, and its `config.json` replaced."""

    def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object], config: Any = None) -> Path:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return rewrite


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """The one line with which BLIP's weights are refused."""

    def message(*arguments: Any, **settings: Any) -> str:
        with pytest.raises(InputError) as caught:
            ImageQA.from_pretrained(*arguments, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message
