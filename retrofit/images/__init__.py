"""Labelled images and batches of them, read by timm's readers, or scikit-learn's digits."""

# How the names of timm's datasets begin; it takes any other name for that of a folder.
NAMED_BY_TIMM = ("torch/", "tfds/", "hfds/", "hfids/", "wds/")
