"""Memory as a thing of its own: cut, joined, moved, saved and opened."""

import copy
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.crossattn import Memory
from regard.vit import InputError

HEADS = {
    "vocabulary": dict(),
    "rank": dict(head="rank"),
    "generate": dict(head="generate", decoder=dict(beams=3)),
}


@pytest.fixture(scope="module")
def qa(make_qa):
    return make_qa(dict(registers=2))


@pytest.fixture(scope="module")
def memory(qa, picture):
    return qa.look([picture(0), picture(1, 16, 48), None, picture(2, 40, 24)])


def same(a: Memory, b: Memory) -> bool:
    """Whether two memories are equal to the last bit; what stands in padding is of no account."""

    def tensors(memory: Memory) -> list[torch.Tensor]:
        seen = torch.ones(len(memory), memory.layers[0].k.shape[2]) if memory.visible is None else memory.visible
        kept = [t.transpose(1, 2)[seen.bool()] for kv in memory.layers for t in (kv.k, kv.v)]
        return [seen.float(), *kept]

    told = [(m.grids, m.cls, m.registers, m.fingerprint, m.dtype, m.visible is None) for m in (a, b)]
    return told[0] == told[1] and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def refused(call, *says: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


# A memory is a list of items


def test_a_memory_tells_where_and_how_large_it_is(qa, memory):
    tokens = 3 + 15
    assert len(memory) == 4
    assert (memory.device, memory.dtype) == (torch.device("cpu"), torch.float32)
    assert memory.layers[0].k.shape == (4, 4, tokens, 8)
    assert memory.nbytes == 2 * 2 * 4 * 4 * tokens * 8 * 4 + 4 * tokens
    assert memory[0].nbytes == 2 * 2 * 4 * tokens * 8 * 4, "one item needs no `visible`"


@pytest.mark.parametrize(
    ("index", "items"),
    [
        (2, [2]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        (slice(None), [0, 1, 2, 3]),
        (slice(0, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(2, 2), []),
        ([0, 2], [0, 2]),
        ((3, -4, 3), [3, 0, 3]),
        (torch.tensor([1, 3]), [1, 3]),
        ([], []),
        (torch.tensor(1), [1]),
    ],
    ids=str,
)
def test_items_are_chosen_as_from_a_list(qa, memory, index, items, scores):
    chosen = memory[index]
    assert len(chosen) == len(items)
    assert chosen.grids == tuple(memory.grids[i] for i in items)
    assert (chosen.cls, chosen.registers, chosen.fingerprint) == (memory.cls, memory.registers, memory.fingerprint)
    answers = qa.ask(chosen, [["What is it?"]] * len(items))
    for (answer,), item in zip(answers, items, strict=True):
        expected = qa.ask(memory[item], "What is it?")
        torch.testing.assert_close(scores(answer), scores(expected), atol=1e-5, rtol=0)


def test_numbers_and_slices_are_views_and_lists_copies(memory):
    def first(m: Memory) -> int:
        return m.layers[0].v.data_ptr()

    for index in (1, slice(1, 3), slice(1, None, 2)):
        assert first(memory[index]) == memory.layers[0].v[1:].data_ptr()
        assert memory[index].layers[0].v.untyped_storage().data_ptr() == first(memory)
    assert memory[[1, 2]].layers[0].v.untyped_storage().data_ptr() != first(memory)


def test_what_is_cut_out_leaves_the_padding_of_others_behind(memory):
    assert [memory[i].layers[0].k.shape[2] for i in range(4)] == [18, 15, 1, 18]
    assert memory[1:3].visible.tolist() == [[True] * 15, [False] * 15]
    assert memory[[0, 3]].visible is None
    assert memory[2].visible.tolist() == [[False]]


@pytest.mark.parametrize("index", [4, -5, [0, 4], torch.tensor([-5])], ids=str)
def test_an_item_that_does_not_exist_is_an_index_error(memory, index):
    with pytest.raises(IndexError, match="of a memory of 4"):
        memory[index]


@pytest.mark.parametrize("index", [[True, False, True, True], torch.tensor([True] * 4), "first", 1.0, None], ids=str)
def test_items_are_chosen_by_whole_numbers_only(memory, index):
    with pytest.raises(TypeError):
        memory[index]


def test_memories_are_joined_and_padded(qa, picture, questions, scores):
    pictures = [picture(0, 8, 16), picture(1, 40, 48), None, picture(2)]
    parts = [qa.look(pictures[:1]), qa.look(pictures[1:3]), qa.look(pictures[3:])]
    joined, whole = Memory.cat(parts), qa.look(pictures)
    assert joined.grids == whole.grids
    assert torch.equal(joined.visible, whole.visible)
    assert joined.fingerprint == whole.fingerprint
    groups = [questions[:2], questions[1:3], questions[:1], questions[3:]]
    for ours, theirs, alone in zip(qa.ask(joined, groups), qa.ask(whole, groups), pictures, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(scores(a), scores(b), atol=1e-5, rtol=0)
            torch.testing.assert_close(scores(a), scores(qa.ask(qa.look([alone]), a.question)), atol=1e-5, rtol=0)
    assert same(parts[0] + parts[1] + parts[2], joined)
    assert same(Memory.cat([whole]), whole)
    assert same(joined[1:3], parts[1])
    assert same(Memory.cat(joined[i] for i in range(4)), joined)
    assert same(joined[0:0] + joined, joined)
    assert (qa.look(pictures[3]) + qa.look(pictures[3])).visible is None


def test_what_does_not_belong_together_is_not_joined(qa, make_qa, picture, memory):
    other = make_qa(dict(registers=2), text=dict(depth=1))
    refused(lambda: Memory.cat([]), "no memory to join")
    refused(lambda: memory + memory.to(torch.bfloat16), "memory 1 is in torch.bfloat16", "memory.to(device, dtype)")
    refused(lambda: memory + other.look(picture(0)), "memory 1 and memory 0 were made by different models")
    with pytest.raises(TypeError):
        memory + None


def test_joined_memories_pass_gradients_on(make_qa, picture, questions):
    qa = make_qa()
    joined = Memory.cat([qa.remember(picture(0)[None]), qa.remember([picture(1, 16, 48)])])
    encoded = qa.tokenizer(questions[:2], 64)
    qa.logits(joined, encoded.ids, encoded.mask).pow(2).sum().backward()
    assert all((block.attn.to_q.weight.grad != 0).any() for block in qa.vit.blocks)


# Devices and dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_reads_a_memory_cast_with_it(make_qa, picture, questions, scores, dtype):
    qa = make_qa(dict(registers=2))
    pictures = [picture(0), None, picture(1, 16, 48)]
    memory = qa.look(pictures)
    expected = [scores(a) for a in qa.ask(memory, questions[:3])]
    cast = memory.to(dtype)
    assert (cast.dtype, cast.layers[1].v.dtype, cast.visible.dtype) == (dtype, dtype, torch.bool)
    assert cast.nbytes < 0.6 * memory.nbytes
    half = copy.deepcopy(qa).to(dtype)
    for looked in (cast, half.look(pictures)):
        answers = half.ask(looked, questions[:3])
        assert answers[0].attention.rows().dtype == torch.float32
        torch.testing.assert_close([scores(a) for a in answers], expected, atol=3e-2, rtol=0)
    # And back: what the half-precision model saw, asked by the same in full precision.
    wide = qa.ask(half.look(pictures).to(torch.float32), questions[:3])
    torch.testing.assert_close([scores(a) for a in wide], expected, atol=3e-2, rtol=0)


def test_to_takes_what_tensors_take_and_copies_nothing_without_need(memory):
    assert memory.to("cpu").layers[0].k is memory.layers[0].k
    for cast in (
        memory.to(torch.float64),
        memory.to("cpu", torch.float64),
        memory.to(device="cpu", dtype=torch.float64),
        memory.to(torch.zeros((), dtype=torch.float64)),
    ):
        assert cast.dtype == torch.float64
        assert cast.grids == memory.grids
    assert memory.to("meta").visible.device.type == "meta"


def test_a_memory_in_another_dtype_or_place_than_the_model_is_told(qa, memory, questions):
    for elsewhere, says in (
        (memory.to(torch.bfloat16), "in torch.bfloat16 on cpu, the model asks in torch.float32 on cpu"),
        (memory.to("meta"), "on meta"),
    ):
        refused(
            lambda elsewhere=elsewhere: qa.ask(elsewhere, [[], [], [], []]), says, "memory.to('cpu', torch.float32)"
        )


def test_under_autocast_a_memory_is_read_in_the_dtype_of_autocast(make_qa, picture, questions, scores):
    qa = make_qa(text=dict(qk_norm=True))
    memory = qa.look([picture(0), picture(1, 16, 48)])
    expected = [scores(a) for a in qa.ask(memory, questions[:2])]
    with torch.autocast("cpu", torch.bfloat16):
        inside = qa.look([picture(0), picture(1, 16, 48)])
        for kept in (memory.to(torch.bfloat16), inside):
            torch.testing.assert_close([scores(a) for a in qa.ask(kept, questions[:2])], expected, atol=3e-2, rtol=0)
        refused(lambda: qa.ask(memory, questions[:2]), "asks in torch.bfloat16", "memory.to('cpu', torch.bfloat16)")
    refused(lambda: qa.ask(inside, questions[:2]), "asks in torch.float32", "memory.to('cpu', torch.float32)")


def test_values_beyond_half_precision_are_told(make_qa, picture):
    qa = make_qa()
    with torch.no_grad():
        qa.text.asking[0].attn.to_v.bias.fill_(1e5)
    memory = qa.look(picture(0))
    assert memory.to(torch.bfloat16).dtype == torch.bfloat16
    refused(lambda: memory.to(torch.float16), "not finite numbers in torch.float16", "torch.bfloat16")
    refused(lambda: copy.deepcopy(qa).half().look(picture(0)), "not finite numbers in torch.float16", "torch.bfloat16")
    refused(lambda: memory.to(torch.int32), "torch.int32", "floating-point")


# Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [slice(None), 1, slice(1, 3), [3, 0]], ids=str)
def test_questions_on_a_saved_memory_are_answered_the_same_to_the_last_bit(
    qa, memory, questions, tmp_path, index, dtype
):
    model = copy.deepcopy(qa).to(dtype)
    kept = memory[index].to(dtype)
    kept.save(tmp_path / "memory.safetensors")
    loaded = Memory.load(str(tmp_path / "memory.safetensors"))
    assert same(loaded, kept)
    asked = [questions] * len(kept)
    for before, after in zip(model.ask(kept, asked), model.ask(loaded, asked), strict=True):
        assert before == after
        for a, b in zip(before, after, strict=True):
            assert a.attention.images == b.attention.images
            if a.attention._memory.grids != ((None,),):
                assert torch.equal(a.attention.rows(), b.attention.rows())
    assert [path.name for path in tmp_path.iterdir()] == ["memory.safetensors"]


def test_a_memory_is_one_safetensors_file_with_its_geometry(memory, tmp_path):
    memory.save(tmp_path / "memory.safetensors")
    with safe_open(tmp_path / "memory.safetensors", "pt") as file:
        told = file.metadata()
        assert sorted(file.keys()) == ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]
    assert json.loads(told["grids"]) == [[[3, 5]], [[2, 6]], [None], [[5, 3]]]
    assert (told["cls"], told["registers"], told["fingerprint"]) == ("1", "2", memory.fingerprint)


def test_a_memory_that_cannot_be_written_leaves_the_old_one(memory, tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    memory[0].save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        memory.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["memory.safetensors"]


class Trap:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_files_that_are_no_memory_are_refused(qa, memory, tmp_path):
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        told = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is written over

    def written(content: bytes):
        path.write_bytes(content)
        return lambda: Memory.load(path)

    def changed(told=told, **changes):
        kept = {
            name: tensor for name, tensor in {**tensors, **changes.pop("tensors", {})}.items() if tensor is not None
        }
        save_file(kept, path, {**told, **changes})
        return lambda: Memory.load(path)

    refused(written(content[: len(content) // 2]), str(path), "not a readable safetensors file")
    refused(written(b""), str(path))
    refused(written(pickle.dumps(Trap())), str(path), "pickle")
    for says, change in {
        "is no memory": dict(told={}),
        "format 2": dict(format="2"),
        "cls is not stated": dict(told={k: v for k, v in told.items() if k != "cls"}),
        "broken": dict(registers="-1"),
        "3 items": dict(grids="[[[3, 5]], [[2, 6]], [null]]"),
        "layers.0.k is missing": dict(tensors=dict.fromkeys(tensors)),
        "layers.1.v is missing": dict(tensors={"layers.1.v": None, "other": torch.zeros(1)}),
        "shape (4, 4, 17, 8)": dict(tensors={"layers.1.k": tensors["layers.1.k"][:, :, 1:].contiguous()}),
        "other is not expected": dict(tensors={"other": torch.zeros(1)}),
        "torch.float16": dict(tensors={"layers.1.k": tensors["layers.1.k"].half()}),
        "not finite": dict(tensors={"layers.1.k": tensors["layers.1.k"] / 0}),
    }.items():
        refused(changed(**change), str(path), says)
    for grids in (
        "",
        "7",
        "[[[3]], [[2, 6]], [null], [[5, 3]]]",
        '[[["3", 5]], [[2, 6]], [null], [[5, 3]]]',
        "[" * 9999,
    ):
        refused(changed(grids=grids), str(path), "broken")
    qa.save_pretrained(tmp_path / "model")
    refused(lambda: Memory.load(tmp_path / "model" / "model.safetensors"), "no memory", "from_pretrained")
    refused(lambda: Memory.load(tmp_path / "model"), str(tmp_path / "model"), "no such file")
    refused(lambda: Memory.load(tmp_path / "nothing"), "no such file")
    refused(lambda: Memory.load(""), "no path")


# Nothing is copied


class Reading(TorchDispatchMode):
    """Notes the largest new storage, and whose storages the attention kernels read as keys and values."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.kept = {t.untyped_storage().data_ptr() for kv in memory.layers for t in (kv.k, kv.v)}
        self.tokens = memory.layers[0].k.shape[2]
        self.largest, self.reads, self.copies = 0, 0, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        if "attention" in str(op):
            for tensor in args[1:3]:
                if tensor.shape[2] == self.tokens:
                    self.reads += 1
                    if tensor.untyped_storage().data_ptr() not in self.kept:
                        self.copies.append(str(op))
        return out


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("candidates", [None, ["yes", "no", "red"]], ids=["own answers", "candidates"])
@pytest.mark.parametrize("width", [256, 240], ids=["one size", "padded"])
def test_sixteen_and_three_questions_copy_no_keys_of_two_images(make_qa, picture, questions, name, candidates, width):
    qa = make_qa(dict(image_size=(128, 256), patch_size=4, depth=1), **HEADS[name])
    memory = qa.look([picture(0, 128, 256), picture(1, 128, width)])
    asked = [[f"{question} {n}" for question in questions[:4] for n in range(4)], questions[1:4]]
    bytes_per_image = memory.layers[0].k[0].nbytes
    with Reading(memory) as reading:
        answers = qa.ask(memory, asked, candidates=candidates)
    assert [len(group) for group in answers] == [16, 3]
    assert reading.reads == 2 * 2 * 2, "keys and values, of two images that are asked unequally often, in two layers"
    assert reading.copies == []
    assert reading.largest < bytes_per_image, "no tensor as large as the keys of a single image was made"


def test_the_counting_of_copies_sees_a_copy(make_qa, picture, questions):
    qa = make_qa(dict(image_size=(128, 256), patch_size=4, depth=1))
    memory = qa.look([picture(0, 128, 256), picture(1, 128, 256)])
    encoded = qa.tokenizer(questions, 64)
    with torch.inference_mode(), Reading(memory) as reading:
        qa.read(memory, encoded.ids, encoded.mask, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert reading.copies
    assert reading.largest >= memory.layers[0].k[0].nbytes
