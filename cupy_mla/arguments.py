"""The arguments of operations that have many, as one value: made once by `ops`, taken by both twins.

A field is an `Array` for a launcher, and a NumPy view of the same memory for the reference (`Place.call`).
"""

from __future__ import annotations
