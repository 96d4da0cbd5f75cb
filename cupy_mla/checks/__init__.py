"""Checks of a call: `options.py` settings, `validate.py` arrays, `values.py` what arrays hold."""
