"""Checks of a call's arguments: `options.py` of settings, `validate.py` of arrays, `values.py` of values in arrays."""
