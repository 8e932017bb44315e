"""A text encoder from BERT weights gives transformers' numbers, whatever form they come in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from small_bert import (
    MINILM,
    PIECES,
    SIZES,
    TOLERANCE,
    bert,
    needs_minilm,
    questions,
    refused,
    rewritten,
    saved,
    states,
    theirs_of,
    transformers,
    worst,
)  # fmt: skip
from torch import Tensor, nn

from regard.crossattn import ImageQA, TextTokenizer
from regard.crossattn.pretrained.bert import fitted, is_new, open_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "bert")


# The same numbers


@pytest.mark.parametrize("size", SIZES)
def test_states_are_those_of_transformers_with_padding_or_without(size, tmp_path):
    model = bert(**SIZES[size])
    model.save_pretrained(tmp_path)
    encoder, _ = open_text(tmp_path)
    ids, mask = questions()
    assert worst(states(encoder, ids, mask), theirs_of(model, ids, mask), mask) <= TOLERANCE
    whole = torch.ones_like(mask)
    assert worst(states(encoder, ids, whole), theirs_of(model, ids, whole), whole) <= TOLERANCE


def test_the_comparison_sees_a_wrong_number_of_heads_and_a_wrong_eps(folder):
    ids, mask = questions()
    expected = theirs_of(bert(), ids, mask)
    for wrong in ({"heads": 4}, {"norm_eps": 1e-2}, {"activation": "gelu_tanh"}):
        assert worst(states(open_text(folder, **wrong)[0], ids, mask), expected, mask) > 10 * TOLERANCE, wrong


def test_each_question_reads_as_if_it_were_alone(folder):
    encoder, _ = open_text(folder)
    ids, mask = questions()
    together = states(encoder, ids, mask)
    for row in range(len(ids)):
        one = mask[row].sum()
        alone = states(encoder, ids[row : row + 1, :one], None)
        assert torch.allclose(together[row, :one], alone[0], atol=1e-5)


FORMS: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda folder: folder,
    "pytorch_model.bin": lambda folder: pickled(folder),
    "a masked language model, under a prefix": lambda folder: masked(folder),
    "a live BertModel": lambda folder: transformers.BertModel.from_pretrained(folder),
    "a live masked language model": lambda folder: transformers.BertForMaskedLM.from_pretrained(folder),
    "a live model that holds one": lambda folder: nn.Sequential(
        nn.ModuleDict({"auto_model": transformers.BertModel.from_pretrained(folder)})
    ),
    "norms with TensorFlow's names": lambda folder: rewritten(folder, tensorflow_names),
    "half precision": lambda folder: rewritten(folder, lambda tensors: {n: t.half() for n, t in tensors.items()}),
}


def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def masked(folder: Path) -> Path:
    transformers.BertForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    assert "bert.embeddings.word_embeddings.weight" in load_file(folder / "model.safetensors")
    return folder


def tensorflow_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def name(theirs: str) -> str:
        return theirs.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {name(n): t for n, t in tensors.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_weights_opens_the_same(form, folder):
    expected = {name: t for name, t in open_text(folder)[0].state_dict().items() if not is_new(name)}
    source = FORMS[form](folder)
    if form == "half precision":
        types = load_file(folder / "model.safetensors")["embeddings.token_type_embeddings.weight"].float()
        expected = {name: t.half().float() for name, t in expected.items() if name != "positions"}
        assert types.isfinite().all()
    found = open_text(source)[0].state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == torch.float32


def test_a_single_file_opens_with_the_heads_it_is_told(folder, tmp_path):
    file = tmp_path / "mine.safetensors"
    (folder / "model.safetensors").rename(file)
    refused(file, "mine.safetensors", "number of heads", "heads=")
    encoder, tokenizer = open_text(file, heads=12, tokenizer=folder / "vocab.txt")
    ids, mask = questions()
    assert worst(states(encoder, ids, mask), theirs_of(bert(), ids, mask), mask) <= TOLERANCE
    assert tokenizer is not None
    assert any(note.startswith("norm_eps 1e-12") for note in encoder.report.assumed)
    assert any(note.startswith("activation 'gelu'") for note in encoder.report.assumed)


def test_what_the_configuration_states_is_not_reported_as_assumed(folder):
    assert open_text(folder)[0].report.assumed == ()


def test_cross_attention_is_new_and_as_wide_as_what_it_asks(folder):
    encoder, _ = open_text(folder, context_dim=20, cross_every=2, qk_norm=True, pooling="first")
    assert [layer.cross is not None for layer in encoder.layers] == [True, False, True]
    assert [cross.attn.to_k.in_features for cross in encoder.asking] == [20, 20]
    assert all(cross.gate is not None and not cross.gate.any() for cross in encoder.asking)
    assert (encoder.config.pooling, encoder.config.norm, encoder.training) == ("first", "post", False)


# The tokenizer beside


def test_the_tokenizer_beside_the_weights_comes_along(folder):
    tokenizer = open_text(folder)[1]
    assert tokenizer(["What is reddish?"], 24).ids.tolist() == [[2, 5, 6, 7, 8, 9, 3]]
    tokenizer.save(folder / "tokenizer.json")
    (folder / "vocab.txt").write_text("not to be read")
    assert len(open_text(folder)[1]) == len(PIECES)
    assert open_text(folder, tokenizer=tokenizer)[1] is tokenizer


def test_without_a_tokenizer_beside_there_is_none(folder):
    (folder / "vocab.txt").unlink()
    assert open_text(folder)[1] is None
    assert open_text(bert())[1] is None


def test_a_vocabulary_that_tells_capitals_apart_is_refused(folder):
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    refused(folder, "vocab.txt", "capitals")
    (folder / "tokenizer_config.json").write_text("[]")
    refused(folder, "tokenizer_config.json")


def test_rows_of_words_that_are_no_tokens_are_left_out(folder):
    (folder / "vocab.txt").write_text("\n".join(PIECES[:-3]))
    encoder, tokenizer = open_text(folder)
    assert encoder.config.vocab_size == len(encoder.words.weight) == len(tokenizer) == len(PIECES) - 3
    assert any("3 rows of words" in note for note in encoder.report.folded)
    (folder / "vocab.txt").write_text("\n".join([*PIECES, "more"]))
    refused(folder, "21 tokens", "20 rows")


def test_a_hub_name_brings_its_vocabulary(folder, tmp_path, monkeypatch):
    fetched: list[str] = []

    def snapshot(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        place = tmp_path / "cache"
        place.mkdir(exist_ok=True)
        for file in folder.iterdir():
            if file.name in allow_patterns:
                (place / file.name).write_bytes(file.read_bytes())
                fetched.append(file.name)
        return str(place)

    files = [type("File", (), {"rfilename": file.name}) for file in folder.iterdir()]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: type("Info", (), {"siblings": files}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    encoder, tokenizer = open_text("owner/bert")
    assert len(tokenizer) == len(PIECES)
    assert sorted(fetched) == ["config.json", "model.safetensors", "vocab.txt"]
    assert encoder.report.source.startswith("owner/bert")


# An encoder whose cross-attention is made anew


def test_fitted_keeps_what_reads_text_and_makes_the_rest_anew(folder):
    encoder, _ = open_text(folder)
    with torch.no_grad():
        for cross in encoder.asking:
            cross.gate.fill_(1.0)
    other = fitted(encoder.config, 20, encoder.state_dict())
    assert all(not cross.gate.any() for cross in other.asking)
    assert torch.equal(states(encoder, *questions()), states(other, *questions()))


# Real weights


@needs_minilm
def test_the_real_minilm_gives_transformers_states():
    encoder, tokenizer = open_text(MINILM)
    assert (encoder.config.heads, encoder.config.norm_eps, encoder.config.max_tokens) == (12, 1e-12, 512)
    texts = [
        "What shape is in the image?",
        "Is there a café beside the 3-storey house?",
        "does the image not contain a teal shape? " * 20,
        "why",
    ]
    encoded = tokenizer(texts, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(MINILM)(texts, padding=True, return_tensors="pt")
    assert torch.equal(encoded.ids, theirs["input_ids"])
    assert torch.equal(encoded.mask, theirs["attention_mask"].bool())
    model = transformers.BertModel.from_pretrained(MINILM).eval()
    expected = theirs_of(model, encoded.ids, encoded.mask)
    assert worst(states(encoder, encoded.ids, encoded.mask), expected, encoded.mask) <= TOLERANCE


@needs_minilm
def test_the_real_minilm_knows_what_is_meant():
    """Its sentences' mean states, compared by angle as its authors do."""
    encoder, tokenizer = open_text(MINILM)
    encoded = tokenizer(["a cat sleeps on the sofa", "the kitten is napping on a couch", "shares fell on Monday"], 512)
    pooled = nn.functional.normalize(encoder.pool(states(encoder, encoded.ids, encoded.mask), encoded.mask), dim=-1)
    near, far = float(pooled[0] @ pooled[1]), float(pooled[0] @ pooled[2])
    assert near > 0.6
    assert far < 0.2


def test_opened_encoders_go_into_a_model(folder):
    encoder, tokenizer = open_text(folder, context_dim=32)
    assert isinstance(tokenizer, TextTokenizer)
    qa = ImageQA.compose(vit={"dim": 32, "depth": 1, "heads": 2}, text=(encoder, tokenizer), answers=["yes"])
    assert qa.text.report is encoder.report
