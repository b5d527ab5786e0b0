"""Argument checks name the argument, what it got and what it takes."""

import pytest
import torch

from labkit import _check


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_integer_refuses(value: object) -> None:
    with pytest.raises(ValueError, match=r"batch: got .*; takes an integer of at least 1"):
        _check.integer("batch", value, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True, -0.1, 1.1])
def test_number_refuses(value: object) -> None:
    with pytest.raises(ValueError, match=r"top_p: got .*; takes a number from 0.0 to 1.0"):
        _check.number("top_p", value, 0.0, 1.0)


def test_a_seed_is_what_a_generator_takes() -> None:
    torch.Generator().manual_seed(_check.seed("seed", 2**64 - 1))
    for wrong in (2**64, -1, True, 1.0):
        with pytest.raises(ValueError, match="seed: got .*; takes an integer from 0 to 18446744073709551615"):
            _check.seed("seed", wrong)


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(ValueError) as refused:
        _check.choice("name", "x" * 5000, ["llama"])
    assert len(str(refused.value)) < 300


def test_choice_names_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"did you mean llama"):
        _check.choice("family", "lama", ["llama", "qwen"])


def test_dtype_takes_itself_and_its_name() -> None:
    assert _check.dtype("dtype", "bfloat16") is _check.dtype("dtype", torch.bfloat16) is torch.bfloat16
    for wrong in ("bf17", torch.int8, 16, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype: got"):
            _check.dtype("dtype", wrong)


def test_device_refuses_what_is_not_here() -> None:
    assert _check.device("device", "cpu") == _check.device("device", "cpu:0") == torch.device("cpu")
    for wrong in ("gpu", "cuda:99", "cuda:999", 2**70, "meta", 3.5):
        with pytest.raises(ValueError, match="device: got"):
            _check.device("device", wrong)


def test_tensor_names_shape_and_dtype() -> None:
    with pytest.raises(ValueError, match=r"tokens: got 'shape \(3,\)'; takes 2 dimensions"):
        _check.tensor("tokens", torch.zeros(3), ndim=2)
    with pytest.raises(ValueError, match="tokens: got 'torch.float32'; takes torch.int64"):
        _check.tensor("tokens", torch.zeros(3), dtypes=(torch.int64,))
    with pytest.raises(ValueError, match=r"tokens: got 'list'; takes a torch.Tensor"):
        _check.tensor("tokens", [1, 2])
