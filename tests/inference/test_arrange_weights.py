"""An output table padded with rows of zeros: the same table and the same logits."""

import pytest
import torch
import torch.nn.functional as F

from monoblock.inference.fast_linear import TABLE_MULTIPLE, make_room, needs_padding, padded_table


@pytest.mark.parametrize("rows", [1, 7, 9, 50])
def test_a_table_with_room_keeps_its_values_and_shares_the_padded_storage(rows):
    table = torch.nn.Parameter(torch.randn(rows, 6, dtype=torch.double))
    before, x = table.detach().clone(), torch.randn(4, 6, dtype=torch.double)
    assert table.data_ptr() != padded_table(table).data_ptr()
    make_room(table)
    padded = padded_table(table)
    assert padded.shape[0] % TABLE_MULTIPLE == 0
    assert padded.shape[0] - rows < TABLE_MULTIPLE
    assert torch.equal(table, before)
    assert table.data_ptr() == padded.data_ptr()  # stored once
    torch.testing.assert_close(F.linear(x, padded)[:, :rows], x @ before.T, rtol=0, atol=1e-12)
    with torch.no_grad():
        table.mul_(2)  # as training does
    assert torch.equal(padded[:rows], 2 * before)
    assert not padded[rows:].any()


def test_a_table_with_a_multiple_of_8_rows_is_not_padded():
    table = torch.nn.Parameter(torch.randn(2 * TABLE_MULTIPLE, 6))
    assert not needs_padding(table)
    assert torch.equal(padded_table(table), table)


def test_a_table_without_room_is_copied():
    table = torch.randn(7, 6, dtype=torch.double)
    padded, x = padded_table(table), torch.randn(4, 6, dtype=torch.double)
    torch.testing.assert_close(F.linear(x, padded)[:, :7], x @ table.T, rtol=0, atol=1e-12)
    assert not padded[7:].any()


def test_a_slice_of_a_larger_matrix_is_not_taken_for_a_padded_table():
    matrix = torch.randn(24, 6)
    for table in (matrix[:7], matrix[5:12]):
        assert not padded_table(table)[7:].any()
