"""The converters of the targets, a file each, or one for a family: `batch_independent.py` has gn, ln,
gn-pn and ln-pn, `normality.py` bnn, lnn, gnn, inn and normal.

`dbn.py` and `dbnn.py` hold their layers too, as a target of another package does. `fused_layers.py`
and `standardized_convolutions.py` are no targets; targets share what they hold.
"""
