"""Programs that fail as they start: imports and syntax."""

from failure_lab.program import Program

_IMPORTS = (
    Program(
        id="import-flash-attn",
        reason="ImportError",
        cause="A library is not installed.",
        root=r"ModuleNotFoundError",
        ranks=2,
        dialect="hf",
        name="train_mem.py",
        script="""
        from flash_attn import flash_attn_varlen_func
        """,
    ),
    Program(
        id="import-removed-name",
        reason="ImportError",
        cause="The installed library no longer has the name.",
        root=r"ImportError: cannot import name",
        launcher="python",
        dialect=None,
        name="finetune_bert.py",
        script="""
        print("fine-tuning bert-base-uncased on mnli", flush=True)
        from transformers import AdamW, get_linear_schedule_with_warmup
        """,
    ),
    Program(
        id="import-broken-extension",
        reason="ImportError",
        cause="A compiled extension is damaged.",
        root=r"ImportError: .*fused_kernels",
        accept_reasons=("OSError",),
        ranks=2,
        dialect="megatron",
        prefix="[default${local_rank}]:",
        name="pretrain_gpt.py",
        files={"fused_kernels.so": b"\x7fELF\x02\x01\x01" + bytes(9)},
        script="""
        print("> compiling and loading fused kernels ...", flush=True)
        import fused_kernels
        """,
    ),
    Program(
        id="import-circular",
        reason="ImportError",
        cause="Two modules import each other.",
        root=r"ImportError: cannot import name .*circular",
        ranks=2,
        dialect="lightning",
        name="main.py",
        files={
            "zoo/__init__.py": "",
            "zoo/layers.py": """\
from zoo.registry import register


@register
class Block:
    pass
""",
            "zoo/registry.py": """\
from zoo.layers import Block

KNOWN = [Block]


def register(kind):
    return kind
""",
        },
        script="""
        from zoo.layers import Block
        """,
    ),
)

_SYNTAX = (
    Program(
        id="syntax-unclosed",
        reason="SyntaxError",
        cause="A parenthesis of the script is not closed.",
        root=r"SyntaxError: ",
        ranks=2,
        dialect="plain",
        name="train_unet.py",
        script="""
        for step in training(10:
            pass
        """,
    ),
    Program(
        id="syntax-indentation",
        reason="SyntaxError",
        cause="A line of a module is indented wrongly.",
        root=r"IndentationError: ",
        launcher="python",
        dialect="deepspeed",
        name="pretrain.py",
        files={
            "schedule.py": """\
def warmup(step):
    scale = step / 100
      return scale
"""
        },
        script="""
        for step in training(2):
            pass
        from schedule import warmup
        """,
    ),
    Program(
        id="syntax-merge-conflict",
        reason="SyntaxError",
        cause="The marks of a merge conflict were left in a module.",
        root=r"SyntaxError: ",
        ranks=2,
        dialect="megatron",
        name="pretrain_t5.py",
        files={
            "arguments.py": """\
LAYERS = 24
<<<<<<< HEAD
HIDDEN = 2048
=======
HIDDEN = 4096
>>>>>>> long-context
"""
        },
        script="""
        import arguments
        """,
    ),
    Program(
        id="syntax-old-print",
        reason="SyntaxError",
        cause="A tool was written for Python 2.",
        root=r"SyntaxError: ",
        launcher="shell",
        dialect=None,
        name="prepare.sh",
        files={
            "tools/count_tokens.py": """\
import sys

total = 0
for line in sys.stdin:
    total += len(line.split())
print total
"""
        },
        script="""
        set -e
        echo "[1/2] counting tokens"
        printf 'a b c\\nd e\\n' | python tools/count_tokens.py
        echo "[2/2] training"
        """,
    ),
)

PROGRAMS = (
    *_IMPORTS,
    *_SYNTAX,
)
