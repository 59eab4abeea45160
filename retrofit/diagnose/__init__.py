"""What is wrong with a network, or what a conversion changed: measured, drawn, on one page."""
