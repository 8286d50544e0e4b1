"""Divisions by zero, and missing attributes."""

from failure_lab.program import Program

_DIVISIONS = (
    Program(
        id="zero-accumulation",
        reason="ZeroDivisionError",
        cause="The global batch is smaller than the ranks' micro batches, so there are no accumulation steps.",
        root=r"ZeroDivisionError",
        ranks=2,
        dialect="deepspeed",
        arguments=("--global-batch", "1"),
        script="""
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--global-batch", type=int)
        accumulation = parser.parse_args().global_batch // WORLD
        for step in training(6):
            if step % accumulation == 0:
                pass
        """,
    ),
    Program(
        id="zero-empty-loader",
        reason="ZeroDivisionError",
        cause="The validation set is empty, and the mean of its losses is asked for.",
        root=r"ZeroDivisionError",
        dialect="lightning",
        name="fit_seg.py",
        files={
            "metrics.py": """\
def mean(losses):
    return sum(losses) / len(losses)
"""
        },
        script="""
        from metrics import mean

        for step in training(5):
            if step == 5:
                print("validation loss", mean([]))
        """,
    ),
    Program(
        id="zero-throughput",
        reason="ZeroDivisionError",
        cause="The throughput of an interval without time.",
        root=r"ZeroDivisionError",
        ranks=2,
        faulty={"rank": 0},
        dialect="titan",
        prefix="[rank${rank}]:",
        script="""
        def throughput(tokens, started, ended):
            return tokens / (ended - started)


        for step in training(6):
            if step == 5 and RANK == 0:
                now = time.time()
                throughput(8192, now, now)
        """,
    ),
)

_ATTRIBUTES = (
    Program(
        id="attribute-wrapped-model",
        reason="AttributeError",
        cause="The wrapped model has no attribute of the model inside.",
        root=r"AttributeError: 'DistributedDataParallel'",
        ranks=2,
        dialect="hf",
        name="run_summarization.py",
        script="""
        from torch.nn.parallel import DistributedDataParallel

        join()
        model = DistributedDataParallel(build())
        print(model.config.vocab_size)
        """,
    ),
    Program(
        id="attribute-none-gradient",
        reason="AttributeError",
        cause="A frozen parameter has no gradient.",
        root=r"AttributeError: 'NoneType' object",
        dialect="plain",
        name="clip_gradients.py",
        script="""
        frozen = nn.Linear(4, 4)
        for step in training(4):
            if step == 3:
                norms = [parameter.grad.norm() for parameter in frozen.parameters()]
        """,
    ),
    Program(
        id="attribute-namespace",
        reason="AttributeError",
        cause="The code asks for an argument that the parser does not define.",
        root=r"AttributeError: 'Namespace' object",
        ranks=3,
        dialect="megatron",
        prefix="[default${local_rank}]:",
        name="pretrain_gpt.py",
        script="""
        import argparse

        args = argparse.Namespace(num_layers=24, hidden_size=2048)
        for step in training(2):
            pass
        print(args.context_parallel_size)
        """,
    ),
    Program(
        id="attribute-removed-alias",
        reason="AttributeError",
        cause="The installed NumPy no longer has an alias.",
        root=r"AttributeError: module 'numpy'",
        launcher="python",
        dialect="deepspeed",
        name="preprocess.py",
        script="""
        import numpy as np

        mask = np.zeros(16, dtype=np.bool8)
        """,
    ),
)

PROGRAMS = (
    *_DIVISIONS,
    *_ATTRIBUTES,
)
