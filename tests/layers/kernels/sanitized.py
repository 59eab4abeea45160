"""Run pytest on the arguments with kernels that are built under sanitizers, which are slow to optimise."""

import sys

import pytest

from retrofit.layers.kernels import build

build._FLAGS = (*(flag for flag in build._FLAGS if flag != "-O3"), "-O1")
build._LIMIT = 900.0

if __name__ == "__main__":
    sys.exit(pytest.main(["-n", "0", "-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
