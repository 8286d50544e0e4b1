"""Batch many requests of all tasks, for free mode, which does not need the bits of exact mode.

Log-probabilities are batched by length and padded on the right. Generations decode in one running
batch, which is padded on the left. Requests join and leave the batch between steps, and each prompt
is read by itself.

transformers' own continuous batching (`generate_batch`) generates the same tokens on a CPU. It is
not used for two reasons. Its planning, made for GPUs, takes many times as long on a CPU as the
forward passes of a tiny model. And it has no stop strings and no seed per request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from holdfast.evaluate.engines.hf.calls import Calls
from holdfast.evaluate.engines.hf.exact import Generation, answer_of, tensor_of
from holdfast.evaluate.types.requests import Answer

_LOGITS_BYTES = 1 << 30  # the largest size of one batch's logits


def plan_scores(lengths: Sequence[int], max_batch: int, vocabulary: int) -> list[list[int]]:
    """Group inputs of similar length into batches, the longest first.

    Args:
        lengths: the number of tokens of each input.
        max_batch: the largest number of inputs in a batch.
        vocabulary: the size of the vocabulary; the logits of a batch, at its padded length, take at
            most 1 GiB.

    Returns:
        For each batch, the indices of its inputs in `lengths`.
    """
    batches: list[list[int]] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if room == 0:
            batches.append([])
            room = max(
                1, min(max_batch, _LOGITS_BYTES // (4 * vocabulary * max(1, lengths[place])))
            )
        batches[-1].append(place)
        room -= 1
    return batches


@torch.inference_mode()
def score_batch(model: Any, pairs: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Answer]:
    """Return the log-probabilities of a batch of inputs, each with its continuations.

    The answers are in one list, in the order of the inputs and their continuations.
    """
    inputs = [tensor_of(packed, model.device)[0] for packed, _ in pairs]
    # Tokens to the right of an input do not affect the input's logits, so no attention mask is
    # needed.
    logits = model(
        torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True), use_cache=False
    ).logits
    answers = []
    for (_, continuations), read, scores in zip(pairs, inputs, logits, strict=True):
        longest, end = max(map(len, continuations)) // 4, read.shape[0]
        rows = torch.log_softmax(scores[end - longest : end], dim=-1)
        for continuation in continuations:
            answers.append(answer_of(rows, tensor_of(continuation, model.device)[0], end))
    return answers


@dataclass(slots=True)
class _Row:
    id: int
    generation: Generation


class RunningBatch:
    """Decode several generations together; the prompt of each `Generation` is read by itself."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._model = calls.model
        self._rows: list[_Row] = []
        self._cache: Any = None  # per layer, keys and values of shape [rows, heads, tokens, size]
        # The shape is [rows, tokens], and 0 marks padding.
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=self._model.device)

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def join(self, id_: int, generation: Generation) -> Answer | None:
        """Read a generation's prompt and add the generation to the batch.

        Returns:
            The answer if the first token ends the generation; otherwise None.
        """
        answer = generation.advance(0.0)
        if answer is None:
            mask = torch.ones(
                (1, generation.prompt.shape[1]), dtype=torch.long, device=self._model.device
            )
            cache, generation.cache = generation.cache, None
            self._rows.append(_Row(id_, generation))
            self._put_together(cache, mask)
        return answer

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Answer]]:
        """Generate one token for each row; remove the rows that end, and return their answers."""
        generations = [row.generation for row in self._rows]
        newest = torch.cat([generation.newest for generation in generations])
        positions = torch.tensor(
            [[one.position()] for one in generations], device=self._model.device
        )
        self._mask = pad(self._mask, (0, 1), value=1)
        outputs = self._model(
            input_ids=newest,
            past_key_values=self._cache,
            attention_mask=self._mask,
            **self._calls.arguments(positions),
        )
        scores = outputs.logits[:, -1].to(torch.float32, copy=True)
        likeliest = scores.argmax(dim=-1, keepdim=True)
        over: list[tuple[int, Answer]] = []
        staying: list[int] = []
        for place, row in enumerate(self._rows):
            answer = row.generation.take(scores[place : place + 1], likeliest[place : place + 1])
            if answer is None:
                staying.append(place)
            else:
                over.append((row.id, answer))
        if over:
            self._keep(staying)
        return over

    def give_up(self) -> list[int]:
        """Remove all rows and return their ids."""
        ids = [row.id for row in self._rows]
        self._keep([])
        return ids

    def _put_together(self, cache: Any, mask: torch.Tensor) -> None:
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        length = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_left(one, length, dim=1) for one in (self._mask, mask)])
        for mine, new in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_left(one, length, dim=2) for one in (mine.keys, new.keys)])
            mine.values = torch.cat(
                [_left(one, length, dim=2) for one in (mine.values, new.values)]
            )

    def _keep(self, places: list[int]) -> None:
        """Keep only the rows at `places`, and drop the columns that are padding in all of them."""
        self._rows = [self._rows[place] for place in places]
        if not places:
            self._cache, self._mask = None, self._mask[:0, :0]
            return
        rows = torch.tensor(places, device=self._model.device)
        self._mask = self._mask[rows]
        first = int(self._mask.any(dim=0).to(torch.long).argmax())
        self._mask = self._mask[:, first:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[rows][:, :, first:]
            layer.values = layer.values[rows][:, :, first:]


def _left(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """Pad the dimension `dim` of a tensor with zeros on the left, up to `length`."""
    after = 2 * (tensor.ndim - 1 - dim)
    return pad(tensor, (0,) * after + (length - tensor.shape[dim], 0))
