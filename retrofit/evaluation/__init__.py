"""How good a network is on labelled images."""
