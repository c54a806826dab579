"""A vocabulary laid in memory with rows of nothing behind it: the same table, and a product that ends where it does."""

import pytest
import torch
import torch.nn.functional as F

from monoblock.decoding.aligned import AT_ONCE, roomy, widen


@pytest.mark.parametrize("rows", [1, 7, 9, 50])
def test_a_widened_table_is_what_it_was_and_has_room(rows):
    table = torch.nn.Parameter(torch.randn(rows, 6, dtype=torch.double))
    before, x = table.detach().clone(), torch.randn(4, 6, dtype=torch.double)
    assert roomy(table) is None
    widen(table)
    wide = roomy(table)
    assert wide.shape[0] % AT_ONCE == 0
    assert wide.shape[0] - rows < AT_ONCE
    assert torch.equal(table, before)
    assert table.data_ptr() == wide.data_ptr()  # nothing is held twice
    torch.testing.assert_close(F.linear(x, wide)[:, :rows], x @ before.T, rtol=0, atol=1e-12)
    with torch.no_grad():
        table.mul_(2)  # what training changes is changed there too
    assert torch.equal(wide[:rows], 2 * before)
    assert not wide[rows:].any()


def test_a_table_that_fits_is_left_alone():
    table = torch.nn.Parameter(torch.randn(2 * AT_ONCE, 6))
    place = table.data_ptr()
    widen(table)
    assert table.data_ptr() == place
    assert roomy(table) is None


def test_a_part_of_another_matrix_is_not_taken_for_a_widened_one():
    whole = torch.randn(24, 6)
    assert roomy(whole[:7]) is None
    assert roomy(whole[5:12]) is None
