"""Questions on one picture with BLIP's weights: Regard against transformers, in one run, fp32 on a CPU.

    python benchmarks/blip_questions.py [--questions 16] [--pairs 5] [--json]
    python benchmarks/blip_questions.py --device cuda --dtype bfloat16          # needs a GPU

Random weights at the size of blip-vqa-base (385 M parameters); speed does not depend on what they say. Both decode
greedily and write as many tokens; before anything is timed their answers are compared, token by token. The two take
turns in one process, medians. Told are:

* one question on one picture;
* 16 questions on one picture: ours looks once; transformers' batch repeats the picture, its loop takes one by one;
* a further question on a picture that was looked at, alone and among 16, beside what its operations would take at the
  speed of a bare matrix product in the same run;
* peak memory beside the weights for the 16 questions.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import torch
from forward_speed import Work, peak_bytes, peer, race
from torch import Tensor

WORDS = 10  # of a question; 12 tokens with its ends
TOKENS = 3  # of an answer: one or two words and the end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, default=12, help="of each of the three towers; fewer for a trial")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    theirs, ours = models(flags)
    pixels = torch.randn(1, 3, 384, 384, device=flags.device, dtype=getattr(torch, flags.dtype))
    questions = some_questions(flags.questions)
    encoded = ours.tokenizer(questions, 64)
    ids, mask = encoded.ids.to(flags.device), encoded.mask.long().to(flags.device)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "num_beams": 1, "do_sample": False}

    @torch.inference_mode()
    def written(rows: slice) -> Tensor:
        repeated = pixels.expand(len(ids[rows]), -1, -1, -1)
        return theirs.generate(pixel_values=repeated, input_ids=ids[rows], attention_mask=mask[rows], **settings)

    def asked(texts: list[str]) -> list[Any]:
        return ours.ask(ours.look(pixels), texts)

    one = slice(0, 1)
    compare(written(slice(None)), ours, ids, mask, pixels)
    memory = ours.look(pixels)
    result: dict[str, Any] = {
        "where": f"{flags.device} {flags.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "parameters": sum(p.numel() for p in ours.parameters()),
    }
    works: dict[str, Work] = {
        "regard, one": lambda: asked(questions[:1]),
        "transformers, one": lambda: written(one),
        "regard, all": lambda: asked(questions),
        "transformers, batch": lambda: written(slice(None)),
        "transformers, loop": lambda: [written(slice(i, i + 1)) for i in range(len(questions))],
        "regard, look": lambda: ours.look(pixels),
        "regard, further": lambda: ours.ask(memory, questions[0]),
        "regard, further together": lambda: ours.ask(memory, questions),
    }
    seconds = race(works, flags.pairs, flags.device)

    def ratio(slow: str, fast: str) -> float:
        return round(statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True)), 2)

    result["ms"] = {name: round(statistics.median(s) * 1e3, 1) for name, s in seconds.items()}
    result["times_faster"] = {
        "one question": ratio("transformers, one", "regard, one"),
        f"{len(questions)} questions, than the batch": ratio("transformers, batch", "regard, all"),
        f"{len(questions)} questions, than the loop": ratio("transformers, loop", "regard, all"),
    }
    per_second = matmul_speed(flags)
    operations = further_operations(ours, int(encoded.mask[0].sum()))
    result["further_question"] = {
        "ms_alone": result["ms"]["regard, further"],
        "ms_among_all": round(result["ms"]["regard, further together"] / len(questions), 1),
        "gflop": round(operations / 1e9, 2),
        "ms_floor": round(operations / per_second * 1e3, 1),
        "gflop_per_s_of_a_bare_product": round(per_second / 1e9),
    }
    result["peak_memory_over_transformers_batch"] = round(
        peak_bytes(works["regard, all"], flags.device) / peak_bytes(works["transformers, batch"], flags.device), 3
    )
    print(json.dumps(result) if flags.json else "\n".join(f"{name:36} {value}" for name, value in result.items()))


def models(flags: argparse.Namespace) -> tuple[Any, Any]:
    """transformers' model with random weights, and ours made from it."""
    transformers = peer("transformers")
    from regard.crossattn import ImageQA

    torch.manual_seed(0)
    config = transformers.BlipConfig(
        text_config={"num_attention_heads": 12, "num_hidden_layers": flags.layers, "encoder_hidden_size": 768},
        vision_config={"image_size": 384, "num_hidden_layers": flags.layers},
    )
    theirs = transformers.BlipForQuestionAnswering(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    ours = ImageQA.from_pretrained(theirs, behaviour="transformers", tokenizer=pieces())
    ours.decoder.config = dataclasses.replace(ours.decoder.config, min_tokens=TOKENS - 1, max_tokens=TOKENS)
    dtype = getattr(torch, flags.dtype)
    return theirs.to(flags.device, dtype), ours.to(flags.device, dtype)


def pieces() -> dict[str, int]:
    """A vocabulary of BERT's size with its special tokens in their places; the others are made-up words."""
    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    letters = "abcdefghijklmnop"
    made = ("".join(letters[number >> shift & 15] for shift in (12, 8, 4, 0)) for number in range(30522))
    return {special.get(number, word): number for number, word in enumerate(made)}


def some_questions(count: int) -> list[str]:
    """Questions of whole words, no two alike."""
    words = [word for word in pieces() if word.isalpha()]
    generator = torch.Generator().manual_seed(1)
    return [
        " ".join(words[i] for i in torch.randint(len(words), (WORDS,), generator=generator).tolist())
        for _ in range(count)
    ]


def compare(expected: Tensor, ours: Any, ids: Tensor, mask: Tensor, pixels: Tensor) -> None:
    """Read what transformers wrote, and choose each next token: the same logits choose the same."""
    with torch.inference_mode():
        states = ours.read(ours.look(pixels), ids, mask.bool())
        read = ours.decoder(expected[:, :TOKENS], ours.decoder.remember(states), ours.readable(mask.bool()))
        chosen = ours.decoder.logits(read).argmax(dim=-1)
    same = (chosen == expected[:, 1 : 1 + TOKENS]).float().mean().item()
    assert same > 0.95, f"only {same:.0%} of the tokens are the same"


def further_operations(model: Any, tokens: int) -> float:
    """Operations of one more question, two per multiplication: encoder without the image's keys and values, decoder."""
    text, decoder, vit = model.config.text, model.config.decoder.text, model.config.vit
    image = vit.grid[0] * vit.grid[1] + 1

    def layer(c: Any, rows: int, own: int, other: int, others_once: int) -> float:
        # q, k, v, out of self-attention; q, out of cross-attention; the MLP; scores and mixtures; the other's k and v
        products = rows * (4 * c.dim**2 + 2 * c.dim**2 + 2 * c.dim * (c.hidden_dim or 4 * c.dim))
        return 2 * (products + 2 * rows * (own + other) * c.dim + others_once * 2 * c.dim**2)

    encoder = text.depth * layer(text, tokens, tokens, image, 0)
    written = decoder.depth * layer(decoder, TOKENS, TOKENS, tokens, tokens)
    return encoder + written + TOKENS * 2 * decoder.dim * (decoder.vocab_size + decoder.dim)


def matmul_speed(flags: argparse.Namespace) -> float:
    """Operations per second of a large bare product."""
    a = torch.randn(2048, 768, device=flags.device, dtype=getattr(torch, flags.dtype))
    b = torch.randn(768, 3072, device=flags.device, dtype=getattr(torch, flags.dtype))
    best = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(a, b)
        if flags.device != "cpu":
            torch.cuda.synchronize()
        best.append(time.perf_counter() - start)
    return 2 * 2048 * 768 * 3072 / statistics.median(best)


if __name__ == "__main__":
    main()
