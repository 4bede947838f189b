"""The elements of tensors as numpy arrays: the same memory where numpy can have it, and the same bits."""

from __future__ import annotations

import pytest
import torch

from podium.protocol.arrays import array_of, dtype_of, read_as, written_as

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_have_torchs_dtype_name_and_share_its_memory(dtype: torch.dtype) -> None:
    column = torch.arange(6).view(3, 2).to(dtype)
    name, array = array_of(column)
    assert dtype_of(name) is dtype
    assert array.__array_interface__["data"][0] == column.data_ptr()
    carrier, own = read_as(name)
    back = torch.from_numpy(array.copy().view(carrier))
    back = back if own is None else back.view(own)
    assert torch.equal(back.view(torch.uint8), column.view(torch.uint8))
    assert (written_as(dtype)[1] is dtype) == (own is None)


def test_elements_of_lazy_conjugates_and_of_tensors_with_a_graph_are_copied() -> None:
    for column in (torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.complex64).imag):
        name, array = array_of(column)
        assert dtype_of(name) is column.dtype
        assert array.tolist() == column.tolist()
