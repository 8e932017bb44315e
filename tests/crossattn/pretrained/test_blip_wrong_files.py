"""BLIP's files with something absent, twice there, contradictory or wrong: kept where it is harmless, else named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.crossattn import ImageQA


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# What may be absent, twice there, or contradict


def test_the_output_is_tied_only_where_both_tables_are_equal(make_blip, save, tmp_path):
    for tied in (True, False):
        blip = make_blip(tied=tied)
        qa = ImageQA.from_pretrained(save(blip, tmp_path / str(tied)))
        assert qa.decoder.config.tied is tied
        table = qa.decoder.body.words.weight if tied else qa.decoder.out.weight
        assert torch.equal(table, blip.text_decoder.cls.predictions.decoder.weight)


def test_a_table_of_its_own_is_kept_whatever_the_configuration_says(copy, rewritten):
    name = "text_decoder.cls.predictions.decoder.weight"
    config = config_of(copy)
    assert config["tie_word_embeddings"] is True
    rows = config["text_config"]["vocab_size"]
    table = torch.randn(rows, 96)
    qa = ImageQA.from_pretrained(rewritten(copy, lambda tensors: tensors.update({name: table})))
    assert torch.equal(qa.decoder.out.weight, table)
    assert any("its values differ" in note for note in qa.report.assumed)


def test_an_equal_table_and_bias_given_twice_are_read_once(blip, copy, rewritten):
    head = blip.text_decoder.cls.predictions
    twice = {
        f"text_decoder.cls.predictions.decoder.{n}": p.detach().clone() for n, p in head.decoder.named_parameters()
    }
    qa = ImageQA.from_pretrained(rewritten(copy, lambda tensors: tensors.update(twice)))
    assert qa.decoder.config.tied
    assert torch.equal(qa.decoder.bias, head.bias)
    assert {n for names in qa.report.unused.values() for n in names} == set(twice)


def test_the_bias_of_the_output_may_stand_under_either_name(blip, copy, rewritten):
    one, other = "text_decoder.cls.predictions.bias", "text_decoder.cls.predictions.decoder.bias"
    qa = ImageQA.from_pretrained(rewritten(copy, lambda tensors: tensors.update({other: tensors.pop(one)})))
    assert torch.equal(qa.decoder.bias, blip.text_decoder.cls.predictions.bias)


def test_two_biases_that_differ_are_refused_where_they_should_be_one(copy, refused, rewritten):
    one, other = "text_decoder.cls.predictions.bias", "text_decoder.cls.predictions.decoder.bias"
    message = refused(rewritten(copy, lambda tensors: tensors.update({other: tensors[one] + 1})))
    assert one in message
    assert other in message


def test_an_untied_model_without_its_table_is_refused(make_blip, save, tmp_path, refused, rewritten):
    name = "text_decoder.cls.predictions.decoder.weight"
    folder = save(make_blip(tied=False), tmp_path / "untied")
    assert name in refused(rewritten(folder, lambda tensors: tensors.pop(name)))


def test_the_authors_file_without_its_table_is_refused(authors, refused):
    name = "text_decoder.cls.predictions.decoder.weight"
    tensors = torch.load(authors)["model"]
    del tensors[name]
    torch.save({"model": tensors}, authors)
    assert name in refused(authors)


def test_the_number_of_heads_is_never_transformers_default(make_blip, save, tmp_path, rewritten):
    folder = save(make_blip(width=128, heads=2), tmp_path / "stated")
    expected = ImageQA.from_pretrained(folder).config
    config = config_of(folder)
    for part in ("text_config", "vision_config"):
        del config[part]["num_attention_heads"]
    qa = ImageQA.from_pretrained(rewritten(folder, lambda tensors: None, config))
    assert qa.config == expected  # 64 each; transformers' class would take 8 here
    assert sum("heads 2: of 64 each" in note for note in qa.report.assumed) == 2


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("text_config", "num_attention_heads", 7, "no multiple of 7 heads"),
        ("text_config", "num_attention_heads", "12", "num_attention_heads '12'"),
        ("text_config", "num_hidden_layers", 3, "3 layers are stated; its tensors are of 2"),
        ("vision_config", "num_hidden_layers", 1, "1 layers are stated; its tensors are of 2"),
        ("text_config", "bos_token_id", 5, "bos_token_id 5"),
        ("text_config", "sep_token_id", 102, "sep_token_id 102"),
        ("vision_config", "hidden_act", "relu", "activation 'relu' is not known"),
        ("vision_config", "layer_norm_eps", -1, "layer_norm_eps -1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(copy, part, name, value, says, refused, rewritten):
    config = config_of(copy)
    config[part][name] = value
    assert says in refused(rewritten(copy, lambda tensors: None, config))


# What is wrong


KINDS = [
    "vision_model.embeddings.class_embedding",
    "vision_model.embeddings.position_embedding",
    "vision_model.embeddings.patch_embedding.weight",
    "vision_model.embeddings.patch_embedding.bias",
    "vision_model.encoder.layers.0.layer_norm1.weight",
    "vision_model.encoder.layers.1.self_attn.qkv.weight",
    "vision_model.encoder.layers.1.self_attn.qkv.bias",
    "vision_model.encoder.layers.1.self_attn.projection.weight",
    "vision_model.encoder.layers.0.mlp.fc1.weight",
    "vision_model.encoder.layers.1.mlp.fc2.bias",
    "vision_model.post_layernorm.bias",
    "text_encoder.embeddings.word_embeddings.weight",
    "text_encoder.embeddings.position_embeddings.weight",
    "text_encoder.embeddings.LayerNorm.weight",
    "text_encoder.encoder.layer.0.attention.self.query.weight",
    "text_encoder.encoder.layer.1.attention.output.LayerNorm.bias",
    "text_encoder.encoder.layer.1.crossattention.self.key.weight",
    "text_encoder.encoder.layer.0.crossattention.output.LayerNorm.weight",
    "text_encoder.encoder.layer.0.intermediate.dense.weight",
    "text_encoder.encoder.layer.1.output.dense.weight",
    "text_decoder.bert.embeddings.word_embeddings.weight",
    "text_decoder.bert.embeddings.position_embeddings.weight",
    "text_decoder.bert.encoder.layer.0.crossattention.self.value.bias",
    "text_decoder.bert.encoder.layer.1.output.LayerNorm.weight",
    "text_decoder.cls.predictions.transform.dense.weight",
    "text_decoder.cls.predictions.transform.LayerNorm.bias",
    "text_decoder.cls.predictions.bias",
]


def spoilt(tensors: dict[str, Tensor], name: str, how: str) -> dict[str, Tensor]:
    tensor = tensors[name]
    rest = {n: t for n, t in tensors.items() if n != name}
    if how == "deleted":
        return rest
    if how == "renamed":
        return {**rest, name + "_odd": tensor}
    if how == "misshapen":
        return {**rest, name: torch.cat((tensor, tensor[..., :1]), dim=-1)}
    return {**rest, name: torch.full_like(tensor, torch.nan)}


@pytest.mark.parametrize("how", ["deleted", "renamed", "misshapen", "not finite"])
def test_a_wrong_tensor_is_named_as_transformers_names_it(copy, how, refused):
    for name in KINDS:
        tensors = load_file(copy / "model.safetensors")
        save_file({n: t.contiguous() for n, t in spoilt(tensors, name, how).items()}, copy / "model.safetensors")
        assert name in refused(copy), name
        save_file(tensors, copy / "model.safetensors")


@pytest.mark.parametrize("how", ["deleted", "renamed", "misshapen", "not finite"])
def test_a_wrong_tensor_is_named_as_the_authors_name_it(authors, as_authors, how, refused):
    tensors = torch.load(authors)["model"]
    for name in as_authors(dict.fromkeys(KINDS, torch.zeros(()))):
        if name.endswith("position_ids") or (name == "text_decoder.cls.predictions.bias" and how != "misshapen"):
            continue  # the bias stands there twice, and the other one serves
        torch.save({"model": spoilt(tensors, name, how)}, authors)
        assert name in refused(authors), name


def test_a_tensor_of_another_task_is_named(copy, refused, rewritten):
    def with_more(tensors: dict[str, Tensor]) -> None:
        tensors["itm_head.weight"] = torch.zeros(2, 96)

    assert "itm_head.weight" in refused(rewritten(copy, with_more))


def test_a_captioner_lacks_the_reader_of_questions(copy, refused, rewritten):
    def without(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("text_encoder.")]:
            del tensors[name]

    assert "text_encoder.embeddings.word_embeddings.weight" in refused(rewritten(copy, without))


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(authors, tmp_path, refused):
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": {**torch.load(authors)["model"], "evil": Evil()}}, authors)
    refused(authors)
    assert not (tmp_path / "ran").exists()


def test_a_folder_cut_short_is_told_of(copy, refused):
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "damaged or cut short" in refused(copy)
