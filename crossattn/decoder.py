"""The decoder that writes answers: causal self-attention, cross-attention to the question's states, a word per step.

The question has read the image; the answer reads the question. Q questions, T question tokens, R rows of answers, t
answer tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.crossattn.cross_attention import Shares
from regard.crossattn.text import Cache, TextConfig, TextEncoder
from regard.vit import fused
from regard.vit.attention import KeysValues
from regard.vit.blocks import initialise
from regard.vit.errors import InputError

MOST_BEAMS = 1000  # every step compares twice as many with the whole vocabulary


@dataclass(frozen=True)
class DecoderConfig:
    """A text decoder, and how it is run unless asked otherwise.

    Attributes:
        text: its layers; their cross-attention asks the states of the question.
        first, last: the token ids that begin and end an answer.
        tied: whether the output layer is the table of words.
        reads_padding: whether answers read the padding behind the question too, as transformers' BLIP lets them; an
            answer then depends on the longest question of its batch.
        beams: answers followed at once; 1 always takes the likeliest next token.
        max_tokens: longest answer, the end token counted.
        min_tokens: shortest answer, the end token not counted.
        length_penalty: finished answers are compared by log-probability / length ** this, the end token counted.
    """

    text: TextConfig
    first: int
    last: int
    tied: bool = False
    reads_padding: bool = False
    beams: int = 3
    max_tokens: int = 10
    min_tokens: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if not 0 <= getattr(self, name) < self.text.vocab_size:
                raise InputError(
                    f"DecoderConfig.{name} is {getattr(self, name)}; token ids go from 0 to {self.text.vocab_size - 1}"
                )
        if not 1 <= self.beams <= MOST_BEAMS:
            raise InputError(f"DecoderConfig.beams is {self.beams}; it must be 1 to {MOST_BEAMS}")
        if not abs(self.length_penalty) <= 10:
            raise InputError(f"DecoderConfig.length_penalty is {self.length_penalty}; it must lie between -10 and 10")
        if not 0 <= self.min_tokens < self.max_tokens <= self.text.max_tokens:
            raise InputError(
                f"DecoderConfig.min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; they must rise, and"
                f" the decoder has {self.text.max_tokens} places"
            )


class TextDecoder(nn.Module):
    """Token ids so far `(R, t)` to states `(R, t, D)` and scores of the next token `(R, t, V)`.

    Args:
        context_dim: width of the question's states.
    """

    def __init__(self, config: DecoderConfig, context_dim: int):
        super().__init__()
        self.config = config
        dim, vocab = config.text.dim, config.text.vocab_size
        self.body = TextEncoder(config.text, context_dim)
        self.transform = nn.Linear(dim, dim)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(dim, eps=config.text.norm_eps)
        self.out = None if config.tied else nn.Linear(dim, vocab, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def reset_parameters(self) -> None:
        """Initialise every weight anew."""
        initialise(self)
        self.body.reset_parameters()
        nn.init.zeros_(self.bias)

    def remember(self, states: Tensor) -> tuple[KeysValues, ...]:
        """Project the questions' states `(Q, T, D)` to keys and values, once per layer."""
        return self.body.remember(states)

    def forward(
        self,
        ids: Tensor,
        asked_states: tuple[KeysValues, ...],
        visible: Tensor | None = None,
        of: Shares = None,
        *,
        mask: Tensor | None = None,
        places: Tensor | None = None,
        cache: Cache | None = None,
        asked: list[Tensor] | None = None,
    ) -> Tensor:
        """Read answers so far; every token sees itself and those before it.

        Args:
            ids: `(R, t)`, from `config.first` on; with a cache those that it does not hold yet.
            asked_states: what `remember` made of Q questions.
            visible: which of the T question tokens may be read, bool `(Q, T)`; None for all.
            of: which question each row answers; by default each question has an equal share of the rows, in order.
            mask: which answer tokens each may read, bool `(R or 1, t, N)`; by default those before it. Several
                answers may share one row as a tree: each token then reads its own ancestors.
            places: each token's place in its answer `(t,)`, where they do not simply stand in order.
            cache: what was read before; it is extended.
            asked: receives the cross-attention queries of each layer, for maps.
        """
        if mask is None and ids.shape[1] > 1:
            t, before = ids.shape[1], 0 if cache is None else len(cache)
            mask = torch.ones(1, t, before + t, dtype=torch.bool, device=ids.device).tril(before)
        return self.body(ids, mask, asked_states, visible, of, asked, places=places, cache=cache)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the token that follows, `(…, D) -> (…, V)`."""
        table = self.body.words.weight if self.out is None else self.out.weight
        return fused.product(self.norm(self.act(self.transform(states))), table, self.bias)
