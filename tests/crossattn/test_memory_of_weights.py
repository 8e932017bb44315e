"""A memory knows the weights that made it: others refuse it, copies of them do not."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.crossattn import ImageQA, Memory, looking
from regard.crossattn.looking import fingerprint
from regard.vit import InputError


def refused(call, *says: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def trained(qa, picture):
    optimizer = torch.optim.AdamW(qa.parameters(), lr=1e-5)
    encoded = qa.tokenizer(["Who?"], 64)
    qa.logits(qa.remember(picture(0)[None]), encoded.ids, encoded.mask).sum().backward()
    optimizer.step()


CHANGES = {
    "a training step": lambda qa, picture: trained(qa, picture),
    "a training step of the norms alone": lambda qa, picture: trained(
        qa.requires_grad_(False) and qa.vit.norm.requires_grad_(True) and qa, picture
    ),
    "other weights loaded": lambda qa, picture: qa.load_state_dict(
        {name: tensor + 1e-3 for name, tensor in qa.state_dict().items()}
    ),
    "a single weight matrix of the image side": lambda qa, picture: torch.nn.init.normal_(
        qa.vit.blocks[1].mlp.fc1.weight
    ),
    "weights swapped for their average": lambda qa, picture: [p.data.mul_(1.001) for p in qa.parameters()],
    "a weight that is another tensor": lambda qa, picture: setattr(
        qa.vit.norm, "weight", torch.nn.Parameter(qa.vit.norm.weight + 0.1)
    ),
    "a key projection": lambda qa, picture: torch.nn.init.normal_(qa.text.asking[1].attn.to_k.weight),
    "a value bias": lambda qa, picture: torch.nn.init.normal_(qa.text.asking[0].attn.to_v.bias),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_memory_from_before_the_weights_changed_is_refused(make_qa, picture, name):
    qa = make_qa()
    memory = qa.look(picture(0))
    before = qa.ask(memory, "Who?")
    assert before == qa.ask(memory, "Who?")
    CHANGES[name](qa, picture)
    refused(lambda: qa.ask(memory, "Who?"), "other weights", "look at the pictures again")
    refused(lambda: qa.ask(memory[0], "Who?"), "other weights")
    refused(lambda: qa.ask(memory + memory, ["Who?", "Who?"]), "other weights")
    assert qa.ask(qa.look(picture(0)), "Who?").probability != before.probability


def test_a_memory_of_another_model_of_the_same_shape_is_refused(make_qa, randomize, picture, tmp_path):
    qa, other = make_qa(), randomize(make_qa(), seed=3)
    refused(lambda: other.ask(qa.look(picture(0)), "Who?"), "another model")
    tuned = make_qa(dict(norm_eps=1e-5))
    for one, two in zip(tuned.parameters(), qa.parameters(), strict=True):
        assert torch.equal(one, two)
    refused(lambda: tuned.ask(qa.look(picture(0)), "Who?"), "another model")
    qa.look(picture(0)).save(tmp_path / "memory")
    refused(lambda: other.ask(Memory.load(tmp_path / "memory"), "Who?"), "another model")


def test_what_a_memory_does_not_come_from_may_change(make_qa, picture, randomize):
    qa = make_qa(text=dict(gate=True))
    memory = qa.look(picture(0))
    before = qa.ask(memory, "Who?")
    for part in (
        qa.head,
        qa.text.words,
        qa.text.layers[0].mlp,
        qa.text.asking[0].attn.to_q,
        qa.text.asking[0].attn.out,
    ):
        randomize(part, seed=5)
    assert qa.ask(memory, "Who?") == qa.ask(qa.look(picture(0)), "Who?") != before


def test_copies_of_a_model_share_its_memories(make_qa, picture, tmp_path):
    qa = make_qa(dict(registers=2))
    memory = qa.look(picture(0))
    qa.save_pretrained(tmp_path / "model")
    reopened = ImageQA.from_pretrained(tmp_path / "model")
    with torch.inference_mode():
        inference = copy.deepcopy(qa)
    assert all(parameter.is_inference() for parameter in inference.parameters())
    for model in (
        copy.deepcopy(qa),
        reopened,
        inference,
        copy.deepcopy(qa).train(),
        copy.deepcopy(qa).double().float(),
    ):
        assert fingerprint(model) == memory.fingerprint
        assert model.ask(memory, "Who?").top == qa.ask(memory, "Who?").top
    qa.vit.requires_grad_(False)
    assert qa.ask(memory, "Who?").question == "Who?"
    with torch.inference_mode():
        inference.vit.norm.weight.mul_(2)  # such tensors have no version
    refused(lambda: inference.ask(memory, "Who?"), "other weights")


def test_memories_made_in_training_are_not_checked(make_qa, picture, monkeypatch):
    qa = make_qa()
    monkeypatch.setattr("regard.crossattn.looking._tensors", lambda model: pytest.fail("training must not pay for it"))
    memory = qa.remember(picture(0)[None])
    encoded = qa.tokenizer(["Who?"], 64)
    qa.logits(memory, encoded.ids, encoded.mask)
    assert memory.fingerprint is None
    with torch.no_grad():
        qa.ask(qa.remember(picture(0)[None]), "Who?")


def test_weights_loaded_over_and_over_are_each_told_apart(make_qa, randomize, picture):
    qa = make_qa()
    states = [{name: t.clone() for name, t in randomize(make_qa(), seed=s).state_dict().items()} for s in (1, 2)]
    memories = []
    for state in states * 3:  # fresh tensors each time, which may take the places of those let go
        qa.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
        memories.append(qa.look(picture(0)))
    assert len({memory.fingerprint for memory in memories}) == 2
    assert qa.ask(memories[1], "Who?") == qa.ask(memories[5], "Who?")
    refused(lambda: qa.ask(memories[4], "Who?"), "other weights")


def test_nothing_is_sampled_twice_while_nothing_changes(make_qa, picture, monkeypatch):
    qa = make_qa()
    memory = qa.look(picture(0))
    qa.ask(memory, "Who?")
    sampled, counts = looking._sampled, []
    monkeypatch.setattr(looking, "_sampled", lambda tensors: counts.append(len(tensors)) or sampled(tensors))
    for _ in range(3):
        qa.ask(memory, "Who?")
    every = len(looking._tensors(qa))
    assert counts == [-(-every // 8)] * 3, "a few of the tensors are looked at each time"
    torch.nn.init.normal_(qa.vit.norm.bias)
    refused(lambda: qa.ask(memory, "Who?"), "other weights")
    assert counts[-1] == every


def test_the_check_looks_at_few_values_of_large_tensors(make_qa):
    qa = make_qa(dict(dim=384, heads=6, depth=4), dict(dim=96))
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Noting():
        fingerprint(qa)
    assert sum(p.numel() for p in qa.vit.parameters()) > 7e6
    assert max(seen) < 8 * 100, "nothing as large as a weight is read or made"
