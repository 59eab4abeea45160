"""The converters of the targets, a file each."""
