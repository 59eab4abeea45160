"""The targets of a conversion: importing this package registers them all."""

from importlib import import_module

from retrofit.conversion_options import CONVERTERS

for file in dict.fromkeys(CONVERTERS.values()):
    import_module(f"{__name__}.{file}")
