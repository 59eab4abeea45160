"""Labelled images and batches of them, read by timm's readers, or scikit-learn's digits."""
