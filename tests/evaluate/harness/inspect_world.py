"""Make a tiny model with a chat template, inspect tasks, and clients without a coordinator."""

import asyncio
import json
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.requests import Answer, Request, pack_tokens, unpack_tokens

WORDS = "what is the sum of one two three four five six seven eight nine ten red green blue yes no A B C D ANSWER : ?"
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }} {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {{ strftime_now('%Y') }} {% endif %}"
)

TASKS = """
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageUser, GenerateConfig
    from inspect_ai.scorer import choice, includes, match, model_graded_qa
    from inspect_ai.solver import generate, multiple_choice, prompt_template, solver, system_message, use_tools
    from inspect_ai.tool import bash, tool

    NUMBERS = "one two three four five six".split()
    SAMPLES = [Sample(input=f"what is the sum of {a} {b} ?", target=b) for a, b in zip(NUMBERS, NUMBERS[1:])]
    SHOTS = "what is the sum of one one ? two"

    @task
    def sums(shots: bool = False):
        solvers = [system_message(SHOTS)] if shots else []
        return Task(dataset=MemoryDataset(SAMPLES), solver=[*solvers, generate()], scorer=[match(), includes()],
                    config=GenerateConfig(max_tokens=6, stop_seqs=["RM", "Y\\t", "gre"]), version=3)

    @task
    def colours():
        samples = [Sample(input=f"what is {c} ?", choices=["red", "green", "blue"], target="B") for c in NUMBERS]
        return Task(dataset=MemoryDataset(samples), solver=multiple_choice(), scorer=choice(),
                    config=GenerateConfig(max_tokens=5))

    @solver
    def twice():
        async def solve(state, generate):
            state = await generate(state)
            state.messages.append(ChatMessageUser(content="yes or no ?"))
            return await generate(state)
        return solve

    @task
    def turns():
        return Task(dataset=MemoryDataset(SAMPLES[:3]), solver=twice(), scorer=includes(),
                    config=GenerateConfig(max_tokens=4), epochs=2)

    @task
    def graded():
        return Task(dataset=MemoryDataset(SAMPLES[:2]), solver=generate(), scorer=model_graded_qa(),
                    config=GenerateConfig(max_tokens=4))

    @task
    def sampled():
        return Task(dataset=MemoryDataset(SAMPLES[:2]), solver=twice(), scorer=includes(), epochs=2,
                    config=GenerateConfig(max_tokens=4, temperature=1.0, seed=5))

    @task
    def contained():
        return Task(dataset=MemoryDataset(SAMPLES), solver=generate(), scorer=match(), sandbox="docker")

    @task
    def some_contained():
        samples = [*SAMPLES, Sample(input="x", target="y", sandbox="k8s")]
        return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=match())

    @task
    def with_bash():
        return Task(dataset=MemoryDataset(SAMPLES[:1]), solver=[use_tools(bash()), generate()], scorer=match())

    @task
    def broken():
        raise ValueError("no such dataset")
"""


def make_model(folder: Path) -> Path:
    """Make a random Llama of two layers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> Path:
    path = folder / "made.py"
    path.write_text(textwrap.dedent(TASKS))
    return path


class ModelClient:
    """Answer each request alone by the model; record the requests in arbitrary order."""

    def __init__(self, folder: Path, *, max_length: int = 4096) -> None:
        from transformers import LlamaForCausalLM

        self.facts = ModelFacts(
            model=0, name="tiny/step-1", tokenizer=str(folder), max_length=max_length
        )
        self._model = LlamaForCausalLM.from_pretrained(folder)
        self.asked: list[Request] = []
        self.open: set[int] = set()
        self.most_open = 0

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        assert sample.sample not in self.open, "a number is used twice at a time"
        self.open.add(sample.sample)
        self.most_open = max(self.most_open, len(self.open))
        await asyncio.sleep(0)
        self.asked += sample.requests
        answers = [self._answer(request) for request in sample.requests]
        self.open.remove(sample.sample)
        return AnsweredSample(sample=sample.sample, answers=answers)

    def _answer(self, request: Request) -> Answer:
        assert request.kind == "generate"
        prompt = torch.tensor([list(unpack_tokens(request.prompt))])
        sampled = {"do_sample": False}
        if request.sampling.temperature:
            torch.manual_seed(request.sampling.seed + request.sampling.repeat)
            sampled = {"do_sample": True, "temperature": request.sampling.temperature}
        with torch.inference_mode():
            told = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.sampling.max_new_tokens,
                pad_token_id=2,
                **sampled,
            )
        new = told[0, prompt.shape[1] :].tolist()  # past the stops: an engine need not see them
        return Answer(
            tokens=pack_tokens(new),
            finish="length",
            prompt_tokens=prompt.shape[1],
            new_tokens=len(new),
        )


class TextClient:
    """Reply with the last word of the last message but one, followed by further text."""

    facts = ModelFacts(model=1, name="far", tokenizer="", max_length=512, takes_text=True)

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        self.asked += sample.requests
        answers = []
        for request in sample.requests:
            words = json.loads(request.text)[-1]["content"].split()
            answers.append(
                Answer(
                    text=f"{words[-2]} red green",
                    finish="stop",
                    prompt_tokens=len(words),
                    new_tokens=3,
                )
            )
        return AnsweredSample(sample=sample.sample, answers=answers)


class FailingClient:
    """Fail every request."""

    facts = TextClient.facts

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        return AnsweredSample(
            sample=sample.sample, answers=[], error="The engine gave up on this request."
        )


class JudgeServer:
    """Run an OpenAI-compatible server that finds everything correct."""

    def __init__(self) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                message = {"role": "assistant", "content": "GRADE: C"}
                told = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": asked[-1]["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
                body = json.dumps(told).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, name="judge")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
