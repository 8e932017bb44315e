"""A decoder learns to write answers: what the loss is, what it is not, and that it can be driven to nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from regard.crossattn import ImageQA
from regard.datasets import Question, QuestionedImage, QuestionSet, load_questions, load_table
from regard.train.answer import prepare, train_answer
from regard.train.evaluate import evaluate_answer
from regard.train.questions import QuestionBatches
from regard.train.recipe import load_recipe
from regard.train.sampling import Draw
from regard.train.scoring import losses, read
from regard.train.written import AnswerWriter, WrittenAnswers, plain_text, written_loss

DECODER = {"text": {"dim": 16, "heads": 2, "depth": 1}}


def writing(small: dict[str, Any], head: str = "generate", **changes: Any) -> dict[str, Any]:
    return {**small, "head": head, "decoder": DECODER, **changes}


def prepared(settings: dict[str, Any]) -> Any:
    return prepare(load_recipe(settings["recipe"], **{k: v for k, v in settings.items() if k != "recipe"}))


@pytest.fixture
def noisy() -> ImageQA:
    """A small model with noise on every weight, in double precision."""
    model = ImageQA.preset(
        questions=["what is it?", "is it a big red square?"],
        answers=["red square", "blue", "a big red square"],
        vit={"image_size": (16, 24), "dim": 16, "heads": 2, "depth": 1},
        text={"dim": 16, "heads": 2, "depth": 1},
        head="rank",
        decoder=DECODER,
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def questions_of(model: ImageQA, answers: list[tuple[str, ...]]) -> tuple[Any, AnswerWriter]:
    asked = [Question(f"q{i}", "what is it?", given) for i, given in enumerate(answers)]
    image = QuestionedImage("image", Path("none.png"), tuple(asked))
    return asked, AnswerWriter(QuestionSet((image,), "toy"), model.tokenizer, model.config.decoder)


def states_of(model: ImageQA, questions: int) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = model.tokenizer(["is it a big red square?"] + ["what is it?"] * (questions - 1), 32)
    memory = model.remember(torch.randn(1, 3, 16, 24, dtype=torch.float64))
    return model.read(memory, encoded.ids, encoded.mask), encoded.mask


def test_the_loss_is_that_of_writing_each_answer_by_itself_token_by_token(noisy: ImageQA) -> None:
    given = [("blue",) * 6 + ("red square",) * 2, ("a big red square",), (), ("blue", "blue", "red square", "big")]
    asked, writer = questions_of(noisy, given)
    states, mask = states_of(noisy, len(given))
    found = written_loss(noisy.decoder, states, mask, writer(asked))
    decoder, config = noisy.decoder, noisy.config.decoder
    for row, answers in enumerate(given):
        expected = 0.0
        for answer in sorted(set(answers)):
            ids = (*noisy.tokenizer.answers([answer])[0], config.last)
            kept = decoder.remember(states[row : row + 1, : int(mask[row].sum())])
            for place, token in enumerate(ids):  # one prediction at a time, the question without its padding
                before = torch.tensor([[config.first, *ids[:place]]])
                chances = decoder.logits(decoder(before, kept)[0, -1]).log_softmax(dim=-1)
                expected -= float(chances[token].detach()) * answers.count(answer) / len(answers)
        assert found[row].item() == pytest.approx(expected, rel=1e-10), answers


def test_padding_behind_the_answers_does_not_change_the_loss(noisy: ImageQA) -> None:
    asked, writer = questions_of(noisy, [("blue",), ("red square", "blue"), ("a big red square",)])
    states, mask = states_of(noisy, 3)
    answers = writer(asked)
    padded = dataclasses.replace(answers, ids=F.pad(answers.ids, (0, 5), value=noisy.tokenizer.pad_id))
    strange = dataclasses.replace(answers, ids=F.pad(answers.ids, (0, 5), value=7))
    found = [written_loss(noisy.decoder, states, mask, a) for a in (answers, padded, strange)]
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(found[2], found[0], atol=1e-12, rtol=0)


def test_the_loss_is_minus_the_log_probability_that_ranking_gives(noisy: ImageQA) -> None:
    asked, writer = questions_of(noisy, [("blue",), ("red square",), ("a big red square",)])
    states, mask = states_of(noisy, 3)
    ranked = noisy.scores(states, mask)
    names = list(noisy.config.answers)
    own = torch.stack([-ranked[row, names.index(question.answers[0])] for row, question in enumerate(asked)])
    torch.testing.assert_close(written_loss(noisy.decoder, states, mask, writer(asked)), own)


def test_equal_shares_and_counted_shares_agree(noisy: ImageQA) -> None:
    """A question without answers makes the shares unequal, and takes no part."""
    states, mask = states_of(noisy, 3)
    given = [("blue",), ("red square",), ("a big red square",)]
    asked, writer = questions_of(noisy, given)
    even = written_loss(noisy.decoder, states, mask, writer(asked))
    asked, writer = questions_of(noisy, [*given[:2], ()])
    uneven = written_loss(noisy.decoder, states, mask, writer(asked))
    torch.testing.assert_close(uneven, torch.cat((even[:2], torch.zeros(1, dtype=torch.float64))))
    asked, writer = questions_of(noisy, [(), (), ()])
    assert written_loss(noisy.decoder, states, mask, writer(asked)).tolist() == [0.0, 0.0, 0.0]


def test_label_smoothing_is_torchs_own_on_every_token(noisy: ImageQA) -> None:
    asked, writer = questions_of(noisy, [("red square",)])
    states, mask = states_of(noisy, 1)
    answers = writer(asked)
    logits = noisy.decoder.logits(noisy.decoder(answers.ids[:, :-1], noisy.decoder.remember(states), mask))[0]
    expected = F.cross_entropy(logits, answers.ids[0, 1:], reduction="sum", label_smoothing=0.1)
    assert written_loss(noisy.decoder, states, mask, answers, 0.1).item() == pytest.approx(expected.item())


def test_answers_begin_and_end_once_and_what_cannot_be_written_is_left_out(noisy: ImageQA) -> None:
    asked, writer = questions_of(noisy, [("Blue", "blue", "☃", "red " * 40)])
    answers = writer(asked)
    config = noisy.config.decoder
    (blue,) = noisy.tokenizer.answers(["blue"])
    assert answers.ids.tolist() == [[config.first, *blue, config.last]]
    assert answers.weights.tolist() == [0.5]
    assert answers.following.tolist() == [*blue, config.last]
    assert set(writer.left_out) == {"☃", "red " * 40}


def test_answers_that_are_spelled_alike_are_one_column_of_the_list(noisy: ImageQA) -> None:
    _, writer = questions_of(noisy, [("Blue", "BLUE", "red  square", "big")])
    assert writer.columns(("red square", "blue"), noisy.tokenizer) == {"Blue": 1, "BLUE": 1, "red  square": 0}


@pytest.mark.parametrize(
    ("one", "other"), [("T-shirt", "t - shirt"), ("Café", "cafe"), (" yes ", "yes"), ("don't know", "don ' t know")]
)
def test_two_spellings_of_an_answer_compare_as_one(one: str, other: str) -> None:
    assert plain_text(one) == plain_text(other)
    assert plain_text("in side") != plain_text("inside")


def test_ten_triplets_are_learned_by_heart_and_written_again(squares: Path) -> None:
    """Answers of one to four words, of several annotators' one; greedy and ranked."""
    torch.manual_seed(0)
    texts = ["red", "blue", "a red square", "on the left side", "no", "yes", "two", "blue one", "it is", "none"]
    rows = [(squares / f"{i % 5}.png", f"question number {'abcdefghij'[i]}?", text) for i, text in enumerate(texts)]
    data = load_table(rows)
    model = ImageQA.preset(
        questions=data.question_texts(),
        answers=texts,
        vit={"image_size": (16, 24), "dim": 32, "heads": 2, "depth": 1},
        text={"dim": 32, "heads": 2, "depth": 1},
        head="generate",
        decoder={"text": {"dim": 32, "heads": 2, "depth": 1}},
    )
    batches = QuestionBatches(
        data, model.tokenizer, 32, model.config.answers, model.preprocess, seed=0, decoder=model.config.decoder
    )
    batch = batches.__getitems__([Draw(i) for i in range(5)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = losses(model, *read(model, batch), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.01
    model.eval()
    assert evaluate_answer(model, data).accuracy == 1.0
    memory = model.look(batches.preprocess.normalize(batch.pixels))
    asked = [[question.text for question in image.questions] for image in data.images]
    told = [answer for of_image in model.ask(memory, asked) for answer in of_image]
    assert [answer.text for answer in told] == [q.answers[0] for image in data.images for q in image.questions]
    assert min(answer.probability for answer in told) > 0.9


# Whole runs


@pytest.mark.parametrize("head", ["generate", "rank"])
def test_the_result_opens_and_scores_what_validation_measured(small: dict[str, Any], tmp_path: Path, head: str) -> None:
    settings = writing(small, head, epochs=3)
    result = train_answer(**settings, out=tmp_path / "run")
    model = ImageQA.from_pretrained(tmp_path / "run")
    assert model.config.head == head
    _, data = prepared(settings)
    held_out = QuestionSet(data.held_out.images, "held out")
    assert evaluate_answer(model, held_out).accuracy == pytest.approx(result.fit.best_score, abs=1e-7)


def test_generate_and_rank_are_trained_alike(small: dict[str, Any], tmp_path: Path) -> None:
    states = []
    for head in ("generate", "rank"):
        train_answer(**writing(small, head, epochs=1), out=tmp_path / head)
        states.append(ImageQA.from_pretrained(tmp_path / head).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_every_question_counts_and_a_free_answer_is_never_outside_of_a_list(
    small: dict[str, Any], squares: Path
) -> None:
    module, _ = prepared(writing(small))
    questions = load_questions(squares, "train")
    score = evaluate_answer(module.model, questions)
    assert (score.n_questions, score.out_of_vocabulary) == (72, 0)
    strange = QuestionSet(
        tuple(
            QuestionedImage(i.id, i.path, (*i.questions, Question(f"x{i.id}", i.questions[0].text, ("perhaps ☃",))))
            for i in questions.images
        ),
        "with strangers",
    )
    more = evaluate_answer(module.model, strange)
    assert (more.n_questions, more.n_correct) == (96, score.n_correct)
    module.model.config = dataclasses.replace(module.model.config, head="rank")
    assert evaluate_answer(module.model, strange).out_of_vocabulary == 24


def test_half_precision_trains_a_decoder(small: dict[str, Any], tmp_path: Path) -> None:
    trainer = {"accelerator": "cpu", "precision": "bf16-mixed", "log_every_n_steps": 1}
    for head in ("generate", "rank"):
        settings = writing(small, head, epochs=1, trainer=trainer, gradient_checkpointing=head == "rank")
        result = train_answer(**settings, out=tmp_path / head)
        assert 0 <= result.fit.best_score <= 1
        model = ImageQA.from_pretrained(tmp_path / head)
        assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in model.parameters())


def test_made_answers_of_nothing_have_their_shapes() -> None:
    made = WrittenAnswers.made([[], []], first=1, last=2, padding=0)
    assert (made.ids.shape, made.shares, len(made.rows)) == ((0, 2), (0, 0), 0)
