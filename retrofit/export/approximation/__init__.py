"""Polynomials and lines in place of the power transform: fitted, and given out to layers."""
