"""Ranks that run on other GPUs of their node than before."""

from holdfast.recover.shim.gpus import turned


def test_the_visible_gpus_move_by_one_where_that_is_asked_for(tmp_path):
    for name in ("0000:01", "0000:02", "0000:03"):
        (tmp_path / name).mkdir()
    asked = {"HOLDFAST_TURN_GPUS": "1"}
    assert turned(asked, driver=tmp_path) == {"CUDA_VISIBLE_DEVICES": "1,2,0"}
    chosen = {**asked, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert turned(chosen, driver=tmp_path) == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    assert turned({**asked, "CUDA_VISIBLE_DEVICES": "3"}, driver=tmp_path) == {}
    assert turned({**asked, "CUDA_VISIBLE_DEVICES": ""}, driver=tmp_path) == {}, (
        "no GPU is to be used"
    )
    assert turned({"HOLDFAST_TURN_GPUS": ""}, driver=tmp_path) == {}
    assert turned(asked, driver=tmp_path / "none") == {}
