"""Opening BLIP's files: both dialects, the tokenizer, what may be absent, and what is wrong."""

import subprocess
import sys
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from regard.crossattn import ImageQA
from regard.crossattn.pretrained import open_blip


def same_weights(one: ImageQA, other: ImageQA) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


# What was opened


def test_a_folder_opens_as_published(folder, pieces):
    qa = ImageQA.from_pretrained(folder)
    assert not qa.training
    config = qa.config
    assert (config.vit.heads, config.text.heads, config.decoder.text.heads) == (12, 12, 12)
    assert (config.text.norm, config.text.norm_eps, config.vit.norm_eps) == ("post", 1e-12, 1e-6)
    assert (config.head, config.decoder.beams, config.decoder.max_tokens, config.decoder.min_tokens) == (
        "generate", 3, 9, 0,
    )  # fmt: skip
    assert not config.decoder.reads_padding
    assert config.decoder.first == qa.tokenizer.id("[DEC]") == len(pieces)
    assert config.decoder.last == pieces.index("[SEP]")
    assert len(qa.tokenizer) == config.text.vocab_size == len(pieces) + 2


def test_every_tensor_stands_in_the_report(folder):
    qa = ImageQA.from_pretrained(folder)
    theirs = set(load_file(folder / "model.safetensors"))
    report = qa.report
    assert set(report.renamed.values()) | {n for names in report.unused.values() for n in names} == theirs
    assert set(report.renamed) == set(qa.state_dict())
    assert report.layout == "blip, transformers"
    assert str(folder) in report.source
    assert report.parameters == sum(p.numel() for p in qa.parameters())
    assert "\n" in str(report)


def test_a_rank_head_has_its_own_answers(folder):
    qa = ImageQA.from_pretrained(folder, head="rank", answers=["yes", "no"])
    assert (qa.config.head, qa.config.answers) == ("rank", ("yes", "no"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"behaviour": "lavis"}, "behaviour is 'lavis'; choose 'original' or 'transformers'"),
        ({"head": "vocabulary"}, "head is 'vocabulary'"),
        ({"image_size": 100}, "image_size is 100; it must be (height, width) in pixels, multiples of the 16 px"),
        ({"image_size": "big"}, "image_size is 'big'"),
        ({"answers": ["yes", "yes"]}, "'yes' twice"),
    ],
)
def test_a_wrong_setting_is_named(folder, settings, says, refused):
    assert says in refused(folder, **settings)


def test_weights_in_half_precision_open_in_the_dtype_asked_for(copy, rewritten):
    rewritten(copy, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    assert {p.dtype for p in ImageQA.from_pretrained(copy).parameters()} == {torch.float32}
    qa = ImageQA.from_pretrained(copy, dtype=torch.bfloat16)
    assert {p.dtype for p in qa.parameters()} == {torch.bfloat16}


def test_a_pickled_folder_and_a_file_by_any_name_open_alike(folder, copy, blip, tmp_path, refused):
    expected = ImageQA.from_pretrained(folder)
    (copy / "model.safetensors").unlink()
    torch.save(blip.state_dict(), copy / "pytorch_model.bin")
    same_weights(ImageQA.from_pretrained(copy), expected)
    same_weights(ImageQA.from_pretrained(folder / "model.safetensors"), expected)
    torch.save({"state_dict": {f"net.{n}": t for n, t in blip.state_dict().items()}}, tmp_path / "run.ckpt")
    told = ImageQA.from_pretrained(folder).report.assumed
    assert not any("heads" in note for note in told)
    message = refused(tmp_path / "run.ckpt", tokenizer=folder)
    assert "no multiple of heads of 64, and nothing states their number" in message  # 96 wide, and no config.json


def test_a_live_module_opens_with_a_tokenizer(blip, folder, pieces, refused):
    expected = ImageQA.from_pretrained(folder)
    for tokenizer in (folder, folder / "vocab.txt", {piece: i for i, piece in enumerate(pieces)}):
        qa = ImageQA.from_pretrained(blip, tokenizer=tokenizer)
        same_weights(qa, expected)
        assert qa.config == expected.config
    assert all(p.data_ptr() != q.data_ptr() for p in qa.parameters() for q in blip.parameters())
    assert "pass tokenizer=" in refused(blip)


def test_another_live_module_is_refused(refused):
    assert "Linear" in refused(torch.nn.Linear(2, 2))


def test_nothing_but_regard_is_needed_to_open_one(folder):
    code = (
        "import sys; from regard.crossattn import ImageQA; import torch;"
        f"qa = ImageQA.from_pretrained({str(folder)!r}); print(qa.ask(qa.look(torch.zeros(3, 64, 64)), 'what').text);"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The authors' file


def test_the_authors_file_holds_the_same_model(narrow, authors, save, tmp_path):
    ours, theirs = (ImageQA.from_pretrained(p) for p in (authors, save(narrow, tmp_path / "folder")))
    same_weights(ours, theirs)
    assert ours.config == theirs.config
    report = ours.report
    assert report.layout == "blip, original"
    assert report.unwrapped == ("wrapper 'model'",)
    assert len(report.unused["counted places"]) == 2
    assert any("text side, heads 2: of 64 each" in note for note in report.assumed)
    assert any("image side, heads 2: of 64 each" in note for note in report.assumed)


def test_the_authors_file_alone_says_what_is_missing(authors, refused):
    (authors.parent / "vocab.txt").unlink()
    message = refused(authors)
    assert "neither tokenizer.json nor vocab.txt lies in" in message
    assert "tokenizer=" in message


def test_a_vit_l_is_read_by_the_question_and_the_decoder_reads_the_question(
    make_blip, as_authors, authors, images_of, questions_of, fill
):
    """transformers cannot hold such a model in one: it gives the decoder the width of the image side (G12)."""
    wide, narrow = make_blip(width=192, heads=3), make_blip(width=128, heads=2)
    transformers = pytest.importorskip("transformers")
    text = transformers.BlipTextConfig(**{**narrow.config.text_config.to_dict(), "encoder_hidden_size": 192})
    reader = fill(transformers.models.blip.modeling_blip_text.BlipTextModel(text, add_pooling_layer=False), 5)
    state = {n: t for n, t in narrow.state_dict().items() if n.startswith("text_decoder.")}
    state |= {n: t for n, t in wide.state_dict().items() if n.startswith("vision_model.")}
    state |= {f"text_encoder.{n}": t for n, t in reader.state_dict().items()}
    torch.save({"model": as_authors(state)}, authors)
    qa = ImageQA.from_pretrained(authors, behaviour="transformers")
    assert (qa.config.vit.dim, qa.config.text.dim, qa.config.vit.heads, qa.config.text.heads) == (192, 128, 3, 2)
    images, (ids, mask) = images_of(3, 3), questions_of(3, 3)
    with torch.no_grad():
        seen = wide.vision_model(images).last_hidden_state
        asked = reader(ids, attention_mask=mask.long(), encoder_hidden_states=seen).last_hidden_state
        states = qa.read(qa.remember(images), ids, mask)
        torch.testing.assert_close(states, asked, atol=1e-4, rtol=1e-5)
        answers = torch.tensor([[qa.decoder.config.first, 7, 8]] * 3)
        theirs = narrow.text_decoder(answers, encoder_hidden_states=asked).logits
        ours = qa.decoder.logits(qa.decoder(answers, qa.decoder.remember(states)))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


# The tokenizer


def test_a_tokenizer_of_another_size_is_refused(copy, pieces, refused):
    (copy / "vocab.txt").write_text("\n".join(pieces[:-3]) + "\n")
    message = refused(copy)
    assert f"{len(pieces) + 2} rows" in message
    assert "vocab.txt has" in message


def test_a_vocabulary_that_has_the_two_pieces_is_taken_as_it_is(copy, pieces):
    ordered = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces[5:], "[DEC]", "[ENC]")
    (copy / "vocab.txt").write_text("\n".join(ordered) + "\n")
    qa = ImageQA.from_pretrained(copy)
    assert (qa.tokenizer.id("[DEC]"), qa.tokenizer.id("[ENC]")) == (len(pieces), len(pieces) + 1)


def test_a_tokenizer_json_serves_as_well(copy):
    transformers = pytest.importorskip("transformers")
    expected = ImageQA.from_pretrained(copy)
    transformers.BertTokenizerFast(vocab=str(copy / "vocab.txt")).save_pretrained(copy)
    assert (copy / "tokenizer.json").is_file()
    (copy / "vocab.txt").unlink()
    questions = ["What is the color of the dog?", "Is it 2 dogs, or cats?", "déjà vu"]
    ours, theirs = (qa.tokenizer(questions, 48) for qa in (ImageQA.from_pretrained(copy), expected))
    assert torch.equal(ours.ids, theirs.ids)
    assert ours.words == theirs.words


def test_a_tokenizer_that_tells_capitals_apart_is_refused(copy, refused):
    transformers = pytest.importorskip("transformers")
    transformers.BertTokenizerFast(vocab=str(copy / "vocab.txt"), do_lower_case=False).save_pretrained(copy)
    assert "capitals" in refused(copy)


# The hub


def test_a_repository_gives_all_that_a_blip_needs(folder, monkeypatch, tmp_path):
    asked: list[str] = []
    place = tmp_path / "cache"

    def snapshot(name: str, *, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        place.mkdir(exist_ok=True)
        asked.extend(allow_patterns)
        for file in folder.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (place / file.name).write_bytes(file.read_bytes())
        return str(place)

    listed = [type("File", (), {"rfilename": file.name})() for file in folder.iterdir()]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: type("Info", (), {"siblings": listed})())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    qa = ImageQA.from_pretrained("someone/blip-vqa")
    same_weights(qa, ImageQA.from_pretrained(folder))
    assert {"config.json", "preprocessor_config.json", "tokenizer.json", "vocab.txt", "model.safetensors"} <= set(asked)
    assert qa.report.source.startswith("someone/blip-vqa")


def test_open_blip_reads_for_itself(folder):
    same_weights(open_blip("mine", folder), ImageQA.from_pretrained(folder))
