"""Every tensor of a BERT file is accounted for; what does not fit, and what is no BERT, is told in one line."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_bert import SIZES, bert, configured, refused, rewritten, saved, transformers
from torch import Tensor

from regard.crossattn.pretrained.bert import open_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "bert")


# Every tensor is accounted for


@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
)
def test_the_report_names_every_tensor_of_the_file_once(kind, tmp_path):
    bert(kind).save_pretrained(tmp_path)
    report = open_text(tmp_path)[0].report
    names = set(load_file(tmp_path / "model.safetensors"))
    prefix = "" if kind == "BertModel" else "bert."
    unused = [name for some in report.unused.values() for name in some]
    taken = [prefix + name for name in report.renamed.values()]
    beside = [name if name in names else prefix + name for name in unused]
    assert sorted(taken + beside) == sorted(names)
    assert any("token type 0 of 2" in note for note in report.folded)
    expected = {
        "BertModel": {"pooler"},
        "BertForMaskedLM": {"heads of the pre-training"},
        "BertForPreTraining": {"pooler", "heads of the pre-training"},
        "BertForSequenceClassification": {"pooler", "beside the text encoder"},
    }
    assert set(report.unused) == expected[kind]


WRONG = [
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
    "embeddings.LayerNorm.weight",
    "encoder.layer.1.attention.self.key.bias",
    "encoder.layer.2.attention.output.LayerNorm.bias",
    "encoder.layer.0.intermediate.dense.weight",
    "encoder.layer.1.output.dense.weight",
]


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("wrong", ["deleted", "renamed", "misshapen", "not finite"])
def test_one_wrong_tensor_is_an_error_that_names_it(wrong, name, prefix, folder):
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {prefix + n: t for n, t in tensors.items()}
        own = tensors.pop(prefix + name)
        if wrong == "renamed":
            tensors[prefix + name + "_odd"] = own
        elif wrong == "misshapen":
            tensors[prefix + name] = torch.cat((own, own[..., :1]), dim=-1)
        elif wrong == "not finite":
            tensors[prefix + name] = torch.full_like(own, torch.nan)
        return tensors

    refused(rewritten(folder, change), prefix + name)


def test_a_tensor_that_nothing_takes_is_an_error(folder):
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"encoder.layer.0.crossattention.self.query.weight": torch.zeros(48, 48)}

    refused(rewritten(folder, change), "encoder.layer.0.crossattention.self.query.weight", "would change the numbers")


def test_a_layer_that_is_missing_at_the_end_is_noticed(folder):
    refused(
        rewritten(folder, lambda tensors: {n: t for n, t in tensors.items() if "layer.2." not in n}),
        "3 layers are stated",
        "of 2",
    )


def test_tables_of_another_size_than_stated_are_an_error_that_names_them(folder):
    refused(configured(folder, vocab_size=21), "embeddings.word_embeddings.weight", "(20, 48)", "(21, 48)")


# Other models


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "roberta"}, ["'roberta'"]),
        ({"is_decoder": True}, ["a decoder"]),
        ({"hidden_act": "relu"}, ["relu"]),
        ({"hidden_act": "silu"}, ["silu"]),
        ({"num_attention_heads": "twelve"}, ["num_attention_heads", "twelve"]),
        ({"num_attention_heads": 5}, ["48", "5"]),
        ({"num_attention_heads": -4}, ["num_attention_heads", "-4"]),
        ({"layer_norm_eps": "small"}, ["layer_norm_eps", "small"]),
        ({"num_attention_heads": None}, ["number of heads", "heads="]),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(changes, words, folder):
    refused(configured(folder, **changes), "bert", *words)


def test_relatives_that_count_places_otherwise_are_refused(folder, tmp_path):
    config = transformers.RobertaConfig(**SIZES["many heads"], vocab_size=20, type_vocab_size=1)
    model = transformers.RobertaModel(config)
    refused(model, "'roberta'")
    for prefix, word in (("", "one row"), ("roberta.", "'roberta.'")):
        file = tmp_path / "relative.safetensors"
        save_file({prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)
        refused(file, word, heads=12)


def test_a_file_without_a_text_encoder_or_with_two_is_told(folder, tmp_path):
    refused(rewritten(folder, lambda tensors: {"blocks.0.weight": torch.zeros(2)}), "embeddings.word_embeddings.weight")
    both = tmp_path / "both.safetensors"
    tensors = bert().state_dict()
    save_file({f"{side}.{name}": t.clone() for side in ("query", "passage") for name, t in tensors.items()}, both)
    refused(both, "several", "'query.'", "'passage.'", heads=12)


def test_a_model_of_regard_is_told_apart(make_qa, tmp_path):
    make_qa().save_pretrained(tmp_path / "qa")
    refused(tmp_path / "qa", "a model of Regard")
    refused(tmp_path / "nowhere.safetensors", "nowhere.safetensors")


class Trap:
    def __reduce__(self) -> Any:
        return sys.exit, (1,)


def test_nothing_in_a_file_is_run(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"embeddings.word_embeddings.weight": Trap()}))
    refused(folder, "pytorch_model.bin", "refused")


def test_what_the_weights_decide_cannot_be_changed(folder):
    refused(folder, "dim", dim=64)
    refused(folder, "norm", norm="pre")
    refused(folder, "activation", activation="swiglu")
    refused(folder, "pooling", pooling="middle")
