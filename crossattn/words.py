"""Where each word of a question looked: word-to-patch maps, from the queries an ordinary `ask` made.

Nothing is computed until a map is asked for, and then only from that question's own queries and the
remembered keys; the answer is not touched. L asking layers, H heads, T tokens, N image tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.crossattn.memory import Grid, Memory
from regard.crossattn.tokenizer import Word
from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import checked_rows

Layer = int | Literal["mean"]


class WordMaps(Mapping[str, Tensor]):
    """A mapping from each word of a question to its map `(grid height, grid width)`, averaged over heads and layers.

    `asked` are the queries `(1, H, T, K)` of each asking layer, without padding; `memory` holds the one item.
    A word that stands twice gives the mean of its places; `map(i)` gives the i-th word alone. Of several images the
    mapping holds the first one's maps, `map(word, image=i)` gives the others'.
    """

    def __init__(self, words: Sequence[Word], asked: Sequence[Tensor], memory: Memory, attentions: Sequence[Attention]):
        self._words = tuple(words)
        self._asked, self._memory, self._attentions = tuple(asked), memory, tuple(attentions)
        self._rows: Tensor | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The question's words in order, as typed."""
        return tuple(word.text for word in self._words)

    @property
    def images(self) -> int:
        """How many images the question was asked about, those that are "no image" counted."""
        return len(self._memory.grids[0])

    def __getitem__(self, word: str) -> Tensor:
        return self.map(word)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.words))

    def __len__(self) -> int:
        return len(set(self.words))

    def __contains__(self, word: object) -> bool:
        return word in self.words

    def map(
        self, word: str | int, layer: Layer = "mean", head: int | Literal["mean"] = "mean", image: int = 0
    ) -> Tensor:
        """The share of attention on each patch, `(grid height, grid width)`, non-negative.

        The maps of all images sum to 1 less the mass on their class tokens and registers (see `mass`).

        Args:
            word: a word of the question, or its number.
            layer: an asking layer counted from 0 (negative from the end), or their mean.
            head: a head counted from 0, or their mean.
            image: one of the question's images, counted from 0.

        Raises:
            InputError: no such word, layer, head or image, or the question was asked without an image.
        """
        return self._patches(self._row(word, layer, head), image)

    def mass(
        self, word: str | int, layer: Layer = "mean", head: int | Literal["mean"] = "mean", image: int = 0
    ) -> dict[str, float]:
        """The share of a word's attention on `patches`, `cls` and `registers` of an image; over all images they sum
        to 1.
        """
        row, cls, registers = self._row(word, layer, head), self._memory.cls, self._memory.registers
        row = row[self._place(image)[0]]
        return {
            "patches": row[cls + registers :].sum().item(),
            "cls": row[:cls].sum().item(),
            "registers": row[cls : cls + registers].sum().item(),
        }

    @torch.inference_mode()
    def rows(self) -> Tensor:
        """Every row at once: `(L, H, T, N)`, T with the special tokens, N in the order class token, registers, patches;
        those of several images stand side by side.

        Raises InputError where the question was asked without an image.
        """
        length = self._memory.length(0)
        if not length:
            raise InputError("this question was asked without an image; there is no map")
        if self._rows is None:
            visible = self._memory.visible
            mask = None if visible is None else visible[:, None, None, :]
            layers = zip(self._attentions, self._asked, self._memory.layers, strict=True)
            rows = torch.cat([checked_rows(attn, q, kv, mask) for attn, q, kv in layers])
            # Beyond lies what a larger item of the same batch made necessary: padding, with rows of exactly 0.
            self._rows = rows[..., :length]
        return self._rows

    def word_rows(self) -> Tensor:
        """`rows` with one row for each word, the mean of its tokens: `(L, H, words, N)`."""
        return torch.stack([self.rows()[:, :, self._tokens(i)].mean(dim=2) for i in range(len(self._words))], dim=2)

    def places(self, number: int) -> list[int]:
        """The places of a word's tokens in the question."""
        return self._tokens(number)

    def mixed(self, shares_T: Tensor, image: int = 0) -> Tensor:
        """An image's maps of the question's tokens mixed in these proportions, `(T,) -> (grid height, grid width)`."""
        rows_TN = self.rows().mean(dim=(0, 1))
        return self._patches(shares_T[: len(rows_TN)] @ rows_TN, image)

    def _patches(self, row_N: Tensor, image: int) -> Tensor:
        span, grid = self._place(image)
        return row_N[span][self._memory.cls + self._memory.registers :].unflatten(0, grid)

    def _place(self, image: int) -> tuple[slice, Grid]:
        """Where an image's tokens stand in a row, and its grid."""
        grids, spans = self._memory.grids[0], self._memory.spans()
        if not isinstance(image, int) or not -len(grids) <= image < len(grids):
            raise InputError(f"image {image!r} does not exist: the question was asked of {len(grids)}, 0 the first")
        span, grid = spans[image], grids[image]
        if span is None or grid is None:
            raise InputError(f"image {image} of this question is none; there is no map")
        return span, grid

    def _row(self, word: str | int, layer: Layer, head: int | Literal["mean"]) -> Tensor:
        rows_HTN = choose(self.rows(), layer, "layer")
        rows_TN = choose(rows_HTN, head, "head")
        return rows_TN[self._tokens(word)].mean(dim=0)

    def _tokens(self, word: str | int) -> list[int]:
        if isinstance(word, int):
            if not -len(self._words) <= word < len(self._words):
                raise InputError(f"word {word} does not exist: the question has {len(self._words)} words")
            return list(self._words[word].tokens)
        places = [token for w in self._words if w.text == word for token in w.tokens]
        if not places:
            raise InputError(f"the question has no word {word!r}; its words are {', '.join(self.words)}")
        return places


def choose(rows: Tensor, index: int | str, what: str) -> Tensor:
    """One layer or head of `rows`, or their mean."""
    if index == "mean":
        return rows.mean(dim=0)
    if not isinstance(index, int) or not -len(rows) <= index < len(rows):
        raise InputError(f"{what} {index!r} does not exist: choose 0 to {len(rows) - 1}, or 'mean'")
    return rows[index]
