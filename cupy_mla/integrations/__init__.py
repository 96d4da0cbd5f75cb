"""Bridges to other libraries, each module importable only with its library installed."""
