"""Where each token of an answer looked: at the question's words, and through them at the patches.

Nothing is computed until a map is asked for: then the decoder reads the answer once more, and its rows are recomputed
from that reading's own queries. L decoder layers, H heads, t answer tokens, T question tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.crossattn.decoder import TextDecoder
from regard.crossattn.words import Layer, WordMaps, choose
from regard.vit.errors import InputError
from regard.vit.maps import checked_rows

END = "[end]"


class WrittenMaps:
    """For each token of an answer, its end included if it has one: the share of attention on each word of the question.

    Args:
        decoder: what wrote or ranked the answer.
        states: the question's states `(1, T, D)`, all of which the decoder may read.
        ids: the answer's token ids, without those that begin and end it.
        tokens: the texts of these tokens.
        words: the question's maps, for its words and for `map`.
        ended: whether the answer has an end, rather than was cut.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        states: Tensor,
        ids: Sequence[int],
        tokens: Sequence[str],
        words: WordMaps,
        ended: bool = True,
    ):
        # What chose a token is what was read before it: of a cut answer the last token chose nothing.
        self._decoder, self._states, self._read = decoder, states, tuple(ids if ended else ids[:-1])
        self._words = words
        self.tokens = (*tokens, END) if ended else tuple(tokens)
        self._rows: Tensor | None = None

    @torch.inference_mode()
    def rows(self) -> Tensor:
        """`(L, H, t, T)`, t with the end: row i is what was read when token i was chosen."""
        if self._rows is None:
            decoder, asked = self._decoder, list[Tensor]()
            kept = decoder.remember(self._states)
            ids = torch.tensor([[decoder.config.first, *self._read]], device=self._states.device)
            decoder(ids, kept, asked=asked)
            attentions = [cross.attn for cross in decoder.body.asking]
            self._rows = torch.cat(
                [checked_rows(attn, q, kv, None) for attn, q, kv in zip(attentions, asked, kept, strict=True)]
            )
        return self._rows

    def words(self, token: int | str, layer: Layer = "mean", head: Layer = "mean") -> dict[str, float]:
        """The share of a token's attention on each word of the question; the rest is on its first and last token."""
        row, shares = self._row(token, layer, head), dict[str, float]()
        for number, word in enumerate(self._words.words):
            shares[word] = shares.get(word, 0.0) + row[self._words.places(number)].sum().item()
        return shares

    def map(self, token: int | str, layer: Layer = "mean", head: Layer = "mean", image: int = 0) -> Tensor:
        """Answer token -> question tokens -> patches, `(grid height, grid width)`: each question token's own map, in
        the proportion in which the answer's token read it.

        `layer` and `head` choose among the decoder's; the question's maps are means over theirs. `image` is one of
        those that the question was asked about.
        """
        return self._words.mixed(self._row(token, layer, head), image)

    def _row(self, token: int | str, layer: Layer, head: Layer) -> Tensor:
        rows = choose(choose(self.rows(), layer, "layer"), head, "head")
        if isinstance(token, str):
            if token not in self.tokens:
                raise InputError(f"the answer has no token {token!r}; its tokens are {', '.join(self.tokens)}")
            token = self.tokens.index(token)
        if not -len(self.tokens) <= token < len(self.tokens):
            raise InputError(f"token {token} does not exist: the answer has {len(self.tokens)} tokens")
        return rows[token]
