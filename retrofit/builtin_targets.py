"""The targets that come with the package, registered as those of other packages are."""

from retrofit.registry import OPTIONS, Option, register_target

_FILES = "retrofit.surgery.targets"

_GROUPED = {
    "groups": Option(
        int,
        "Groups per layer: the largest divisor of its channels up to N (default: 8; evonorm-s0: "
        "32). auto: the most that leave a layer's output nearly unchanged, measured on the "
        "`calibrate` images.",
        words=("auto",),
        low=1,
    ),
    "group_channels": Option(
        int,
        "Channels per group, instead of a number of groups; must divide the channels of every "
        "layer.",
        low=1,
    ),
}
_GAUSSIANIZED = {
    "noise": Option(
        float,
        "Noise factor xi in training (default: 0, none; paper: 0.4, LayerNorm 1.0, for training "
        "from scratch).",
        words=("paper",),
    ),
    "noise_kind": Option(
        str,
        "Kind of noise (default: scaled, as in the paper).",
        words=("scaled", "unscaled", "gaussian-dropout"),
    ),
    "alpha": Option(
        float,
        "Degree of gaussianization (default: 1, as in the paper; 0: no transform).",
        high=1,
    ),
}
_WHITENED = {
    "group_size": Option(
        int,
        "Channels whitened together: the largest divisor of a layer's channels up to N (default: "
        "16).",
        low=1,
    ),
}
_PROXIED = {
    "pn_params": Option(
        bool,
        "Learn ProxyNorm's own parameters, proxy_bias and proxy_scale (default: yes, as in the "
        "paper).",
    ),
}
_MEASURED = {
    "calibrate": Option(
        "batches",
        "Images to measure on for `groups` auto; convert also counts those whose predicted class "
        "is unchanged.",
    ),
}
_MIGRATED = {
    "pn_restore": Option(
        bool,
        "With ProxyNorm or `ws`, keep each channel at the mean and scale that the next layer was "
        "trained for (default: yes; from scratch: no, as in the paper).",
    ),
    "ws": Option(
        bool,
        "Also standardize the weights of all convolutions except those in squeeze-excites and "
        "classifiers.",
        switch=True,
    ),
    **_MEASURED,
}

# The order in which shared options are listed is not that of the targets.
for _shared in (_GROUPED, _GAUSSIANIZED, _PROXIED, _MIGRATED):
    OPTIONS.update(_shared)


def _layers(*names: str, file: str = "retrofit.layers") -> tuple[str, ...]:
    return tuple(f"{file}:{name}" for name in names)


_BATCH_NORM = ("bn", "frozen-bn")
_MIGRATION = f"{_FILES}.batch_independent"

register_target(
    "frozen",
    families=_BATCH_NORM,
    converter=f"{_FILES}.frozen:FROZEN",
    layers=_layers("FrozenBatchNorm", "FrozenBatchNormAct"),
    help="the constants used in evaluation",
)

# --- batch-independent

_MIGRATED_LAYERS = _layers("MigratedGroupNorm", "MigratedGroupNormAct")

_OPTIONS_OF = {"ln": _MIGRATED, "gn": _GROUPED | _MIGRATED}

for _to, _options in _OPTIONS_OF.items():
    register_target(
        _to,
        families=_BATCH_NORM,
        converter=f"{_MIGRATION}:{_to.upper()}",
        layers=_MIGRATED_LAYERS,
        options=_options,
        help="per-image statistics",
    )
for _to, _options in _OPTIONS_OF.items():
    register_target(
        f"{_to}-pn",
        families=(*_BATCH_NORM, "gn"),
        converter=f"{_MIGRATION}:{_to.upper()}_PN",
        layers=(*_MIGRATED_LAYERS, *_layers("ProxyNorm")),
        options=_PROXIED | _options,
        help="also normalize the activation",
    )

# --- normality

_OF_BATCH_NORM = _layers(
    "BatchNormalNorm1d",
    "BatchNormalNorm2d",
    "BatchNormalNorm3d",
    "BatchNormalNormAct2d",
    "SyncBatchNormalNorm",
    "SyncBatchNormalNormAct",
)
_OF_LAYER_NORM = _layers(
    "LayerNormalNorm",
    "LayerNormalNorm2d",
    "LayerNormalNormAct",
    "LayerNormalNormAct2d",
)
_OF_GROUP_NORM = _layers("GroupNormalNorm", "GroupNormalNormAct")
_OF_INSTANCE_NORM = _layers("InstanceNormalNorm1d", "InstanceNormalNorm2d", "InstanceNormalNorm3d")

for _to, _families, _classes in (
    ("bnn", ("bn",), _OF_BATCH_NORM),
    ("lnn", ("ln",), _OF_LAYER_NORM),
    ("gnn", ("gn",), _OF_GROUP_NORM),
    ("inn", ("in",), _OF_INSTANCE_NORM),
    (
        "normal",
        ("bn", "ln", "gn", "in"),
        (*_OF_BATCH_NORM, *_OF_LAYER_NORM, *_OF_GROUP_NORM, *_OF_INSTANCE_NORM),
    ),
):
    register_target(
        _to,
        families=_families,
        converter=f"{_FILES}.normality:NORMALITY",
        layers=_classes,
        options=_GAUSSIANIZED,
        help="a power transform after the norm",
    )

# --- whitening

_WHITENING = "whitening"

register_target(
    "dbn",
    families=("bn",),
    converter=f"{_FILES}.dbn:DBN",
    layers=_layers(
        "DecorrelatedBatchNorm1d",
        "DecorrelatedBatchNorm2d",
        "DecorrelatedBatchNorm3d",
        "DecorrelatedBatchNormAct2d",
        file=f"{_FILES}.dbn",
    ),
    options=_WHITENED,
    help=_WHITENING,
)
register_target(
    "dbnn",
    families=("bn",),
    converter=f"{_FILES}.dbnn:DBNN",
    layers=_layers(
        "DecorrelatedBatchNormalNorm1d",
        "DecorrelatedBatchNormalNorm2d",
        "DecorrelatedBatchNormalNorm3d",
        "DecorrelatedBatchNormalNormAct2d",
        file=f"{_FILES}.dbnn",
    ),
    options=_GAUSSIANIZED | _WHITENED,
    help=_WHITENING,
)

# --- timm's layers

_OF_TIMM = (
    "timm's layers, which have no strength: the outputs change, and convert prints by how much"
)

register_target(
    "evonorm-s0",
    families=("bn",),
    converter=f"{_FILES}.evonorm_s0:EVONORM_S0",
    layers=_layers("EvoNorm2dS0", file="timm.layers"),
    options=_GROUPED | _MEASURED,
    help=_OF_TIMM,
)
register_target(
    "frn-tlu",
    families=("bn",),
    converter=f"{_FILES}.frn_tlu:FRN_TLU",
    layers=_layers("FilterResponseNormTlu2d", file="timm.layers"),
    options=_MEASURED,
    help=_OF_TIMM,
)
