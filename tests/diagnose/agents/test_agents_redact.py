"""Test that redaction removes all of a secret in any wording, and leaves useful text."""

import random
import string
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose.agents.prompts import (
    FAILURE_INSTRUCTIONS,
    FILTER_INSTRUCTIONS,
    VOTE_INSTRUCTIONS,
)
from holdfast.diagnose.agents.redact import PLACEHOLDER, redact, redact_lines
from holdfast.diagnose.agents.untrusted import draw_mark

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
BASE64 = ALNUM + "+/"
URLSAFE = ALNUM + "-_"


def drawn(source, alphabet, count):
    return "".join(source.choice(alphabet) for _ in range(count))


FORMS = {
    "aws id": lambda r: "AKIA" + drawn(r, string.ascii_uppercase + "234567", 16),
    "aws secret": lambda r: drawn(r, BASE64, 40),
    "google key": lambda r: "AIza" + drawn(r, URLSAFE, 35),
    "google oauth": lambda r: "ya29." + drawn(r, URLSAFE, 60),
    "hugging face": lambda r: "hf_" + drawn(r, string.ascii_letters, 34),
    "github": lambda r: "ghp_" + drawn(r, ALNUM, 36),
    "github fine": lambda r: "github_pat_" + drawn(r, ALNUM, 22) + "_" + drawn(r, ALNUM, 59),
    "gitlab": lambda r: "glpat-" + drawn(r, URLSAFE, 20),
    "openai": lambda r: "sk-proj-" + drawn(r, URLSAFE, 48),
    "openai old": lambda r: "sk-" + drawn(r, ALNUM, 48),
    "anthropic": lambda r: "sk-ant-api03-" + drawn(r, URLSAFE, 90),
    "slack": lambda r: "xoxb-" + drawn(r, string.digits, 12) + "-" + drawn(r, ALNUM, 24),
    "wandb": lambda r: drawn(r, HEX, 40),
    "nvidia": lambda r: "nvapi-" + drawn(r, URLSAFE, 64),
    "databricks": lambda r: "dapi" + drawn(r, HEX, 32),
    "jwt": lambda r: (
        "eyJ" + drawn(r, URLSAFE, 30) + "." + drawn(r, URLSAFE, 80) + "." + drawn(r, URLSAFE, 43)
    ),
    "urlsafe 43": lambda r: drawn(r, URLSAFE, 43),
    "base36 40": lambda r: drawn(r, string.ascii_lowercase + string.digits, 40),
}
PLACES = [
    "{}",
    "connecting with {} to the hub",
    "12: [rank3]: Authorization: Bearer {}",
    "curl -H 'X-Api-Key: {}' https://host/v1",
    "HF_TOKEN={}",
    "export WANDB_API_KEY='{}'",
    '{{"user": "a", "access_token": "{}", "n": 3}}',
    "{{'aws_secret_access_key': '{}'}}",
    "https://user:{}@host:8443/path/x.git",
    "https://host/blob?sv=2024&sig={}&se=1",
    "--api-key {} --epochs 3",
    "token => {};",
    "botocore: Credentials(access_key={}, region=x)",
    "ValueError: bad key ({}), give another",
    "cmd: python train.py --hub-token={}",
    "\\\"secret\\\": \\\"{}\\\"",
]  # fmt: skip
WORDS = [
    "hunter2!",
    "correct horse battery",
    "pa/ss@w:rd",
    "p@ss",
    "12345678",
    "ünïcodé…",
    "qu\"ote'd",
    "trailing\\",
]
ONE_WORD_PLACES = [
    "postgresql://user:{}@db:5432/x",
    "redis at admin:{}@10.0.0.1:6379",
    "curl -u admin:{} https://host/x",
    "sshpass -p {} ssh host",
    "Incorrect API key provided: {}",
    "environ: [('HF_TOKEN', '{}'), ('HOME', '/root')]",
    "<api_key>{}</api_key>",
    "secret access key: {}",
    "db_pass={}",
    "token is: {}",
]
PASSWORD_PLACES = [
    "password: {}",
    "DB_PASSWORD={}",
    'passwd="{}"',
    "password is {}",
    "mysql --password={}",
    'no login with the password "{}"',
]  # fmt: skip


def pieces(secret, length=8):
    return {secret[at : at + length] for at in range(max(1, len(secret) - length + 1))}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_token_survives(form):
    source = random.Random(form)
    for place in PLACES * 20:
        secret = FORMS[form](source)
        said = redact(place.format(secret))
        assert not [piece for piece in pieces(secret) if piece in said], (secret, said)
        assert PLACEHOLDER in said


@pytest.mark.parametrize("place", PASSWORD_PLACES)
def test_nothing_of_a_password_survives(place):
    for word in WORDS:
        said = redact(place.format(word))
        assert not [piece for piece in pieces(word, 4) if piece in said], said


@pytest.mark.parametrize("place", ONE_WORD_PLACES)
def test_nothing_of_a_word_without_blanks_survives(place):
    for word in WORDS:
        if not {" ", '"', "/", "@"} & set(word):
            said = redact(place.format(word))
            assert not [piece for piece in pieces(word, 4) if piece in said], said


def test_what_addresses_encode_goes_too():
    source = random.Random(3)
    for _ in range(300):
        said = redact(f"GET /blob?custom={quote(drawn(source, BASE64, 44), safe='')} 403")
        assert said == f"GET /blob?{PLACEHOLDER} 403"


def test_addresses_of_people_go():
    said = redact("mail to jane.doe+x@mail.example.org, or <müller@böhm.de>; user jane@host")
    assert "jane.doe" not in said
    assert "example" not in said
    assert "müller" not in said
    assert "jane@host" in said


def private_key(source):
    body = [drawn(source, BASE64, 64) for _ in range(25)] + [drawn(source, BASE64, 11) + "="]
    return ["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----"]


@pytest.mark.parametrize("before", ["", "[rank0]: ", "17: "])
def test_private_keys_go_line_by_line(before):
    key = private_key(random.Random(1))
    lines = ["before", *(before + line for line in key), "after"]
    said = redact_lines(lines)
    assert said == ["before", *[PLACEHOLDER] * len(key), "after"]
    assert redact("KEY = " + "\\n".join(key) + " end").count("\\n") == 0


def test_a_private_key_that_is_cut_short_takes_no_more_than_itself():
    key = private_key(random.Random(2))[:9]
    said = redact_lines([*key, "torch.OutOfMemoryError: CUDA out of memory.", "step 3"])
    assert said == [PLACEHOLDER] * 9 + ["torch.OutOfMemoryError: CUDA out of memory.", "step 3"]


def test_a_secret_that_is_known_goes_wherever_it_stands():
    said = redact("xx-tiny-key-xx and tiny-key", ["tiny-key", "x"])
    assert said == f"xx-{PLACEHOLDER}-xx and {PLACEHOLDER}"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has 79.11 GiB",
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        "FileNotFoundError: No such file or directory: '/mnt/data/checkpoints/llama3-8B/iter_0001000/mp_rank_00'",
        "[rank3]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (128x512 and 1024x256)",
        '  File "/usr/lib/python3.11/site-packages/torch/nn/parallel/DistributedDataParallel.py", line 1637',
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000)",
        "slurmstepd: error: *** STEP 1234567.0 ON node0007 CANCELLED AT 2026-11-22T07:06:34 DUE TO TIME LIMIT ***",
        "botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden",
        "KeyError: 'optimizer_state'",
        "boto3.exceptions.S3UploadFailedError: Failed to upload x to y; in page starting at 0x00007f02ab3e0000",
        "ModuleNotFoundError: No module named 'transformer_engine_extensions'",
        "tokens per second: 18231, lr 3.0e-4, number of tokenizer workers 8",
        "train.py: error: unrecognized arguments: --micro-batch-sise",
    ],
)
def test_what_a_reader_needs_stays(line):
    assert redact(line) == line


@given(
    st.text(alphabet=st.sampled_from("abK9:/=@ '\"\\.-_<>&?n"), max_size=60) | st.text(max_size=60)
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_twice_is_once_and_no_line_is_lost(text):
    once = redact(f"{text} password={text} token: {text} x://{text}@h")
    assert redact(once) == once
    lines = text.split("\n")
    assert len(redact_lines(lines)) == len(lines)


def test_our_own_words_are_left_alone():
    for ours in (
        FAILURE_INSTRUCTIONS,
        FILTER_INSTRUCTIONS,
        VOTE_INSTRUCTIONS,
        *(draw_mark() for _ in range(200)),
    ):
        assert redact(ours) == ours
