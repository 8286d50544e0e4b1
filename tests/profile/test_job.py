"""The file of a job: refused content, and the sentence of each error."""

import pytest

from holdfast.core.errors import BadUse, NotFound
from holdfast.profile.job import Job

WHOLE = """
[model]
layers = 32
hidden = 4096
heads = 32
vocabulary = 128256
gated = true

[layout]
sequence = 8192
data = 8
recompute = "full"

[gpu]
peak_tflops = 100
"""


def read(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return Job.read(path)


def test_a_whole_file_is_read(tmp_path):
    job = read(tmp_path, WHOLE)
    assert (job.model.layers, job.model.gated, job.layout.tokens_a_step) == (32, True, 8 * 8192)
    assert (job.gpu.name, job.gpu.peak_tflops) == (None, 100)
    job.write(tmp_path / "again.toml")
    assert Job.read(tmp_path / "again.toml") == job


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[model]", "[model", "is not TOML"),
        ("[gpu]", "[gpus]", r"has \[gpus\]. The tables are model, layout and gpu"),
        ("gated", "swiglu", r"\[model\] has no key swiglu. The keys are layers"),
        ("heads = 32", "", r"\[model\] lacks heads. Add"),
        ("layers = 32", "layers = true", "model.layers is True. Give a value of type int"),
        ("layers = 32", "layers = 0", "model.layers is 0"),
        ("gated = true", "gated = 1", "model.gated is 1. Give a value of type bool"),
        ('"full"', '"half"', "layout.recompute is 'half'. Give none, selective or full"),
        ("peak_tflops = 100", 'peak_tflops = "many"', "gpu.peak_tflops is 'many'"),
    ],
)
def test_a_wrong_file_is_a_sentence_with_the_next_step(tmp_path, old, new, said):
    assert old in WHOLE
    with pytest.raises(BadUse, match=said):
        read(tmp_path, WHOLE.replace(old, new))


def test_a_table_that_is_none_and_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadUse, match="model is not a table"):
        read(tmp_path, "model = 3\n")
    with pytest.raises(NotFound, match=r"docs/profile.md has an example"):
        Job.read(tmp_path / "none.toml")
