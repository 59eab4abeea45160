"""Folding: a copy of a network in which every normalization is as few operations as its mathematics allows."""
