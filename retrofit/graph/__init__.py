"""Where things are in a network: tracing, norm and activation sites, and rewriting one call in a
block's forward.
"""
