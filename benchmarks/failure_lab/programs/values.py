"""Errors of computation: shapes, assertions and values."""

from failure_lab.program import Program

_RUNTIME = (
    Program(
        id="runtime-shapes",
        reason="RuntimeError",
        cause="Two matrices do not fit each other.",
        root=r"RuntimeError: mat1 and mat2 shapes",
        ranks=2,
        dialect="plain",
        name="train_mlp.py",
        script="""
        head = nn.Linear(64, 10)
        for step in training(3):
            if step == 2:
                head(torch.randn(8, 32))
        """,
    ),
    Program(
        id="runtime-ddp-unused",
        reason="RuntimeError",
        cause="A wrapped model has parameters that took no part in the loss.",
        root=r"RuntimeError: Expected to have finished reduction",
        ranks=2,
        dialect="hf",
        name="train_adapter.py",
        script="""
        from torch.nn.parallel import DistributedDataParallel


        class Adapter(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, inputs):
                return self.used(inputs)


        join()
        model = DistributedDataParallel(Adapter())
        for step in range(3):
            model(torch.randn(4, 8)).sum().backward()
        """,
    ),
    Program(
        id="runtime-backward-twice",
        reason="RuntimeError",
        cause="The graph is walked a second time after it was freed.",
        root=r"RuntimeError: Trying to backward through the graph a second time",
        launcher="python",
        dialect="lightning",
        name="gan.py",
        script="""
        for step in training(3):
            if step == 2:
                loss = build()(torch.randn(2, 16)).pow(2).sum()
                loss.backward()
                loss.backward()
        """,
    ),
    Program(
        id="runtime-dtype",
        reason="RuntimeError",
        cause="Activations and weights have different types.",
        root=r"RuntimeError: (?:expected m1 and m2|mat1 and mat2 must have the same dtype)",
        ranks=2,
        dialect="titan",
        prefix="[rank${rank}]:",
        script="""
        block = build().to(torch.bfloat16)
        for step in training(4):
            if step == 3:
                block(torch.randn(4, 16))
        """,
    ),
)

_ASSERTIONS = (
    Program(
        id="assert-nan-loss",
        reason="AssertionError",
        cause="The loss became NaN.",
        root=r"AssertionError: .*nan",
        accept_reasons=("ValueError",),
        ranks=2,
        faulty={"rank": 1},
        dialect="megatron",
        script="""
        def check(loss, step):
            message = f"Rank {RANK}: found nan in local forward loss calculation at iteration {step}"
            assert not torch.isnan(loss), message


        for step in training(6):
            scale = torch.tensor(0.0 if step == 5 and RANK == 1 else 1.0)
            check((scale * 0.0) / scale, step)
        """,
    ),
    Program(
        id="assert-layers-divide",
        reason="AssertionError",
        cause="The layers cannot be shared out over the pipeline's stages.",
        root=r"AssertionError: .*divisible",
        ranks=2,
        dialect="deepspeed",
        name="pretrain_gpt.py",
        files={
            "arguments.py": """\
def validate(layers, stages):
    assert layers % stages == 0, f'number of layers ({layers}) should be divisible by stages ({stages})'
""",
        },
        script="""
        from arguments import validate

        validate(layers=30, stages=4)
        """,
    ),
    Program(
        id="assert-close",
        reason="AssertionError",
        cause="A kernel's result differs from the reference.",
        root=r"AssertionError: Tensor-likes are not close",
        launcher="python",
        dialect="titan",
        name="verify_kernels.py",
        script="""
        for step in training(2):
            pass
        torch.testing.assert_close(torch.ones(4, 4), torch.ones(4, 4) + 0.1)
        """,
    ),
    Program(
        id="assert-bare",
        reason="AssertionError",
        cause="Without words, the script insists on full batches.",
        root=r"^(?:\[rank\d\]:\s*)?AssertionError",
        dialect="hf",
        ranks=2,
        script="""
        for step in training(3):
            rows = torch.randn(8 - step, 4)
            assert rows.shape[0] >= 6
        """,
    ),
)

_VALUES = (
    Program(
        id="value-empty-optimizer",
        reason="ValueError",
        cause="No parameter is left to train.",
        root=r"ValueError: optimizer got an empty parameter list",
        ranks=2,
        dialect="hf",
        name="train_prompt.py",
        script="""
        model = build().requires_grad_(False)
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        """,
    ),
    Program(
        id="value-padding-token",
        reason="ValueError",
        cause="The tokenizer has no token to pad with.",
        root=r"ValueError: Asking to pad",
        dialect="lightning",
        name="finetune_gpt2.py",
        script="""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        for step in training(2):
            pass
        tokenizer(["a b", "a"], padding=True)
        """,
    ),
    Program(
        id="value-sampler-rank",
        reason="ValueError",
        cause="The sampler is given a rank beyond the world.",
        root=r"ValueError: Invalid rank",
        ranks=2,
        faulty={"rank": 1},
        dialect="plain",
        prefix="[default${local_rank}]:",
        script="""
        from torch.utils.data import DistributedSampler

        join()
        DistributedSampler(range(64), num_replicas=WORLD, rank=RANK * 2)
        for step in training(40):
            time.sleep(0.2)
        """,
    ),
    Program(
        id="value-convert-number",
        reason="ValueError",
        cause="A column of the metrics holds text.",
        root=r"ValueError: could not convert string to float",
        launcher="python",
        dialect="megatron",
        name="resume_schedule.py",
        files={
            "loss.csv": """\
step,loss
1,3.2
2,n/a
"""
        },
        script="""
        import csv

        with open("loss.csv") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        """,
    ),
)

PROGRAMS = (
    *_RUNTIME,
    *_ASSERTIONS,
    *_VALUES,
)
