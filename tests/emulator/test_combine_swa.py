"""`combine_swa` on an emulated GPU: chosen rows and a window, at the edges of rows, and numbers out of range."""

from __future__ import annotations

from ..ops import test_swa as of_operation
from .again import again

test_lists = again(of_operation.test_combine, (0, 20, 9, 37), (1, 20, 9, 37), (4, 130, 128, 37), (128, 0, 128, 37))
test_edges = again(of_operation.test_combine_at_the_edges)
test_hostile_numbers = again(of_operation.test_combine_of_hostile_numbers)
test_images = again(of_operation.test_combine_of_images, (5, 40))
test_rows_that_were_not_gathered = again(of_operation.test_combine_of_windows_that_were_not_gathered)
