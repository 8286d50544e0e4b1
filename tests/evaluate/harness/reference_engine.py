"""Provide an engine with lm-eval's own calls of transformers, one request at a time, in any order."""

import random
from pathlib import Path

from holdfast.evaluate.types.engine import Finished
from holdfast.evaluate.types.requests import Answer, Request, pack_tokens, unpack_tokens


class ReferenceEngine:
    """See `Engine`; finishes requests in random order, a few at a time."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._waiting: list[tuple[int, Request]] = []
        self._order = random.Random(seed)
        self.answered: list[Request] = []

    def submit(self, requests) -> None:
        self._waiting += requests

    def step(self) -> list[Finished]:
        self._order.shuffle(self._waiting)
        batch, self._waiting = self._waiting[:5], self._waiting[5:]
        return [
            Finished(id=number, answer=self.answer(request), started_s=0.0, finished_s=0.0)
            for number, request in batch
        ]

    def answer(self, request: Request) -> Answer:
        self.answered.append(request)
        torch = self._torch
        prompt = list(unpack_tokens(request.prompt))
        if request.kind == "loglikelihood":
            continuation = list(unpack_tokens(request.continuation))
            with torch.no_grad():
                logits = self._model(torch.tensor([(prompt + continuation)[:-1]])).logits
            scores = torch.nn.functional.log_softmax(logits, dim=-1)[0][
                -len(continuation) :
            ].unsqueeze(0)
            wanted = torch.tensor([continuation])
            is_greedy = bool((scores.argmax(dim=-1) == wanted).all())
            return Answer(
                logprob=float(scores.gather(2, wanted.unsqueeze(-1)).squeeze(-1).sum()),
                is_greedy=is_greedy,
            )
        from lm_eval.models.utils_hf import stop_sequences_criteria

        sampling = request.sampling
        context = torch.tensor([prompt])
        if sampling.temperature:
            torch.manual_seed(sampling.seed + sampling.repeat)
        output = self._model.generate(
            input_ids=context,
            max_length=len(prompt) + sampling.max_new_tokens,
            stopping_criteria=stop_sequences_criteria(
                self._tokenizer, list(sampling.until), len(prompt), 1
            ),
            pad_token_id=self._tokenizer.pad_token_id,
            use_cache=True,
            do_sample=sampling.temperature > 0,
            **({"temperature": sampling.temperature} if sampling.temperature else {}),
        )
        return Answer(tokens=pack_tokens(output[0, len(prompt) :].tolist()))
