"""Files that appear whole or not at all, and a network's mode."""
