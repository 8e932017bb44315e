"""Questions to token ids and back to words, on the `tokenizers` library."""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from regard.vit.errors import InputError
from regard.vit.files import write_atomically

PAD, UNKNOWN, FIRST, LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
QUESTION, ANSWER, MASK = "[ENC]", "[DEC]", "[MASK]"  # BLIP begins questions and answers with tokens of their own
_SPECIAL = [PAD, UNKNOWN, FIRST, LAST]
# What BLIP takes out of a question: some characters, spaces at the end, and all behind the 50th word.
_CLEAN_UP = (
    normalizers.Replace(Regex(r'[.!"()*#:;~]'), ""),
    normalizers.Replace(Regex(r" +\z"), ""),
    normalizers.Replace(Regex(r"\A(?:[^ ]* ){49}[^ ]*\K (?m:.*)"), ""),
)


@dataclass(frozen=True)
class Word:
    """A word of a question as typed, and the places of its tokens in the sequence."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class EncodedQuestions:
    """Q questions as tokens.

    Attributes:
        ids: token ids `(Q, T)`, padded at the right.
        mask: True where a token stands, False on padding, `(Q, T)`.
        words: each question's words, in order, punctuation included.
        unknown: each question's words that the vocabulary lacks.
    """

    ids: Tensor
    mask: Tensor
    words: tuple[tuple[Word, ...], ...]
    unknown: tuple[tuple[str, ...], ...]


class TextTokenizer:
    """Sub-word tokenizer: lower-cased words, split into pieces where the vocabulary lacks the whole."""

    def __init__(self, backend: Tokenizer):
        for token in (PAD, UNKNOWN):
            if backend.token_to_id(token) is None:
                raise InputError(f"the tokenizer has no {token} token; Regard needs one for padding and unknown words")
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        vocab = backend.get_vocab()
        if max(vocab.values()) >= len(vocab):
            raise InputError(f"{len(vocab)} pieces do not have the ids 0 to {len(vocab) - 1}; does one stand twice?")
        self.pad_id, self.unknown_id = vocab[PAD], vocab[UNKNOWN]
        self._special = {vocab[token] for token in (*_SPECIAL, MASK, QUESTION, ANSWER) if token in vocab}
        self._of_answers = _without_clean_up(backend)

    @classmethod
    def train(cls, questions: Iterable[str], vocab_size: int = 8192, *, answers: Iterable[str] = ()) -> "TextTokenizer":
        """Learn WordPiece from a data set's questions, and from its answers where a decoder is to write them.

        Pieces that no training text uses are left out, so that no embedding stays untrained and an
        unseen word is reported as unknown instead of being read as noise. Raises InputError without questions.
        """
        if isinstance(questions, str) or isinstance(answers, str):
            raise InputError("a tokenizer is trained on a list of questions, not on one text")
        texts, written = list(questions), list(answers)
        if not texts:
            raise InputError("a tokenizer cannot be trained on no questions at all")
        texts += written
        special = [*_SPECIAL, *([ANSWER] if written else [])]
        learner = _bert_like(models.WordPiece(unk_token=UNKNOWN))
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
        learner.train_from_iterator(texts, trainer)
        used = {t for text in set(texts) for t in learner.encode(text, add_special_tokens=False).tokens}
        pieces = [*special, *sorted(used - set(special))]
        vocab = {piece: number for number, piece in enumerate(pieces)}
        return cls(_with_ends(_bert_like(models.WordPiece(vocab, unk_token=UNKNOWN))))

    @classmethod
    def from_pieces(cls, pieces: Sequence[str], *, first: str = FIRST, clean_up: bool = False) -> "TextTokenizer":
        """A BERT tokenizer of these pieces, in the order of their ids, that begins questions with `first`.

        `clean_up` makes of a question what BLIP was trained on; answers are read as they are.
        Raises InputError for a piece that stands twice, and where a special token is missing.
        """
        vocab = {piece: number for number, piece in enumerate(pieces)}
        if len(vocab) < len(pieces):
            raise InputError(f"the vocabulary has {len(pieces)} pieces, of which only {len(vocab)} are different")
        if missing := [token for token in (*_SPECIAL, first) if token not in vocab]:
            raise InputError(f"the vocabulary lacks {', '.join(missing)}; expected that of a BERT")
        backend = _with_ends(_bert_like(models.WordPiece(vocab, unk_token=UNKNOWN)), first)
        if clean_up:
            backend.normalizer = normalizers.Sequence([*_CLEAN_UP, backend.normalizer])
        return cls(backend)

    @classmethod
    def from_file(cls, path: str | Path) -> "TextTokenizer":
        """Load a `tokenizer.json` of the `tokenizers` library, or a BERT `vocab.txt` (one piece a line).

        Raises InputError for a missing or unreadable file.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"{path}: no such tokenizer file")
        backend = _read_json(path) if path.suffix == ".json" else _read_vocabulary(path)
        try:
            return cls(backend)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`."""
        text = self._backend.to_str(pretty=True)
        write_atomically(path, lambda file: file.write(text.encode()))

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return self._backend.get_vocab_size()

    def id(self, token: str) -> int:
        """The id of a token. Raises InputError where the vocabulary lacks it."""
        number = self._backend.token_to_id(token)
        if number is None:
            raise InputError(f"the tokenizer has no {token} token")
        return number

    def answers(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Each answer's token ids, without those that begin and end it; an answer of blanks has none."""
        encodings = self._of_answers.encode_batch(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]

    def is_special(self, number: int) -> bool:
        """Whether a token stands for no text: padding, unknown, an end."""
        return number in self._special

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to a text, special tokens left out."""
        return self._backend.decode([i for i in ids if i not in self._special], skip_special_tokens=False).strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The token of each id, as the vocabulary spells it."""
        return [self._backend.id_to_token(i) or UNKNOWN for i in ids]

    def __call__(self, questions: Sequence[str], max_tokens: int) -> EncodedQuestions:
        """Encode questions; the batch is as long as its longest.

        Raises InputError for an empty question, or one of more than `max_tokens` tokens.
        """
        for number, question in enumerate(questions, start=1):
            if not isinstance(question, str):
                raise InputError(f"question {number} is no text but {type(question).__name__}")
            if any("\ud800" <= character <= "\udfff" for character in question):
                raise InputError(f"question {number} holds half a character (a lone surrogate); repair its encoding")
        encodings = self._backend.encode_batch(list(questions))
        for number, (question, encoding) in enumerate(zip(questions, encodings, strict=True), start=1):
            if len(encoding.ids) > max_tokens:
                raise InputError(
                    f"question {number} ({' '.join(question[:40].split())}…) has {len(encoding.ids)} tokens,"
                    f" this model reads at most {max_tokens}; shorten it"
                )
            if all(word is None for word in encoding.word_ids):  # nothing, blanks, or invisible characters
                raise InputError(f"question {number} is empty; ask something")
        longest = max((len(e.ids) for e in encodings), default=0)
        ids = torch.full((len(encodings), longest), self.pad_id)
        for row, encoding in zip(ids, encodings, strict=True):
            row[: len(encoding.ids)] = torch.tensor(encoding.ids)
        lengths = torch.tensor([len(e.ids) for e in encodings])
        words = tuple(_words(question, e) for question, e in zip(questions, encodings, strict=True))
        unknown = tuple(
            tuple(word.text for word in of_one if any(e.ids[t] == self.unknown_id for t in word.tokens))
            for of_one, e in zip(words, encodings, strict=True)
        )
        return EncodedQuestions(ids, torch.arange(longest) < lengths[:, None], words, unknown)


def _read_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from error


def _read_vocabulary(path: Path) -> Tokenizer:
    try:  # not splitlines: a piece may be one of Unicode's other line separators
        pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a vocabulary in UTF-8 text ({error})") from error
    vocab: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        if vocab.setdefault(piece, number) != number:
            raise InputError(f"{path}: line {number + 1} repeats {piece!r} of line {vocab[piece] + 1}")
    if missing := [token for token in _SPECIAL if token not in vocab]:
        raise InputError(f"{path}: the vocabulary lacks {', '.join(missing)}; expected a BERT vocab.txt")
    return _with_ends(_bert_like(models.WordPiece(vocab, unk_token=UNKNOWN)))


def _bert_like(model: models.Model) -> Tokenizer:
    backend = Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _with_ends(backend: Tokenizer, first: str = FIRST) -> Tokenizer:
    ends = [(token, backend.token_to_id(token)) for token in (first, LAST)]
    backend.post_processor = processors.TemplateProcessing(single=f"{first} $A {LAST}", special_tokens=ends)
    return backend


def _without_clean_up(backend: Tokenizer) -> Tokenizer:
    """The same without BLIP's clean-up of questions; a `tokenizer.json` keeps it as a part of the normalizer."""
    if not isinstance(backend.normalizer, normalizers.Sequence):
        return backend
    state = json.loads(backend.to_str())
    steps = state["normalizer"]["normalizers"]
    if steps[: len(_CLEAN_UP)] != [json.loads(step.__getstate__()) for step in _CLEAN_UP]:
        return backend
    state["normalizer"]["normalizers"] = steps[len(_CLEAN_UP) :]
    return Tokenizer.from_str(json.dumps(state))


def _words(question: str, encoding: Encoding) -> tuple[Word, ...]:
    """Join sub-tokens to the words they came from, spelled as in the question."""
    places: dict[int, list[int]] = {}
    for token, word in enumerate(encoding.word_ids):
        if word is not None:
            places.setdefault(word, []).append(token)
    offsets = encoding.offsets
    words = []
    for tokens in places.values():
        start, end = offsets[tokens[0]][0], offsets[tokens[-1]][1]
        while end < len(question) and unicodedata.combining(question[end]):
            end += 1  # an accent typed as a character of its own, which lower-casing strips
        words.append(Word(question[start:end], tuple(tokens)))
    return tuple(words)
