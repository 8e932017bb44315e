"""Where each word of a question looked: word-to-patch maps, from the queries an ordinary `ask` made.

Nothing is computed until a map is asked for, and then only from that question's own queries and the
remembered keys; the answer is not touched. L asking layers, H heads, T tokens, N image tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.crossattn.memory import Memory
from regard.crossattn.tokenizer import Word
from regard.vit.attention import Attention
from regard.vit.errors import InputError
from regard.vit.maps import checked_rows

Layer = int | Literal["mean"]


class WordMaps(Mapping[str, Tensor]):
    """A mapping from each word of a question to its map `(grid height, grid width)`, averaged over heads and layers.

    `asked` are the queries `(1, H, T, K)` of each asking layer, without padding; `memory` holds the one image.
    A word that stands twice gives the mean of its places; `map(i)` gives the i-th word alone.
    """

    def __init__(self, words: Sequence[Word], asked: Sequence[Tensor], memory: Memory, attentions: Sequence[Attention]):
        self._words = tuple(words)
        self._asked, self._memory, self._attentions = tuple(asked), memory, tuple(attentions)
        self._rows: Tensor | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The question's words in order, as typed."""
        return tuple(word.text for word in self._words)

    def __getitem__(self, word: str) -> Tensor:
        return self.map(word)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.words))

    def __len__(self) -> int:
        return len(set(self.words))

    def __contains__(self, word: object) -> bool:
        return word in self.words

    def map(self, word: str | int, layer: Layer = "mean", head: int | Literal["mean"] = "mean") -> Tensor:
        """The share of attention on each patch, `(grid height, grid width)`, non-negative.

        The map sums to 1 less the mass on the class token and registers (see `mass`).

        Args:
            word: a word of the question, or its number.
            layer: an asking layer counted from 0 (negative from the end), or their mean.
            head: a head counted from 0, or their mean.

        Raises:
            InputError: no such word, layer or head, or the question was asked without an image.
        """
        row, grid = self._row(word, layer, head), self._memory.grids[0]
        assert grid is not None  # _row has refused a question without image
        return row[self._memory.cls + self._memory.registers :].unflatten(0, grid)

    def mass(self, word: str | int, layer: Layer = "mean", head: int | Literal["mean"] = "mean") -> dict[str, float]:
        """The share of a word's attention on `patches`, `cls` and `registers`; they sum to 1."""
        row, cls, registers = self._row(word, layer, head), self._memory.cls, self._memory.registers
        return {
            "patches": row[cls + registers :].sum().item(),
            "cls": row[:cls].sum().item(),
            "registers": row[cls : cls + registers].sum().item(),
        }

    @torch.inference_mode()
    def rows(self) -> Tensor:
        """Every row at once: `(L, H, T, N)`, T with the special tokens, N in the order class token, registers, patches.

        Raises InputError where the question was asked without an image.
        """
        grid = self._memory.grids[0]
        if grid is None:
            raise InputError("this question was asked without an image; there is no map")
        if self._rows is None:
            visible = self._memory.visible
            mask = None if visible is None else visible[:, None, None, :]
            layers = zip(self._attentions, self._asked, self._memory.layers, strict=True)
            rows = torch.cat([checked_rows(attn, q, kv, mask) for attn, q, kv in layers])
            # Beyond lies what a larger image of the same batch made necessary: padding, with rows of exactly 0.
            self._rows = rows[..., : self._memory.cls + self._memory.registers + grid[0] * grid[1]]
        return self._rows

    def word_rows(self) -> Tensor:
        """`rows` with one row for each word, the mean of its tokens: `(L, H, words, N)`."""
        return torch.stack([self.rows()[:, :, self._tokens(i)].mean(dim=2) for i in range(len(self._words))], dim=2)

    def _row(self, word: str | int, layer: Layer, head: int | Literal["mean"]) -> Tensor:
        rows_HTN = _choose(self.rows(), layer, "layer")
        rows_TN = _choose(rows_HTN, head, "head")
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


def _choose(rows: Tensor, index: int | str, what: str) -> Tensor:
    if index == "mean":
        return rows.mean(dim=0)
    if not isinstance(index, int) or not -len(rows) <= index < len(rows):
        raise InputError(f"{what} {index!r} does not exist: choose 0 to {len(rows) - 1}, or 'mean'")
    return rows[index]
