"""Which dtype each tensor has in the image.

Per tensor first: a glob given by the user, then the checkpoint; else `generator_dtype` for floating tensors;
else the tensor's own. Some tensors must not follow the global value (router biases, `A_log`, some norms stay
float32), and some must not be cast at all: integers and booleans never are, and a cast that would change what
the bits mean is an error.

A glob may also name a scheme of quantisation (:data:`windlass.names.SCHEMES`). It applies to the weights of Linear
layers; any other tensor that it matches goes on to the rules after it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.names.quantised import SCHEMES, Scheme, is_glob

__all__ = ["DtypeRules", "canonical_dtype"]

#: By canonical name, the name in a safetensors header. The table is the core's.
STORED = {name: _windlass.dtype_safetensors(name) for name in _windlass.dtypes()}
#: As configurations have them (bf16, fp16, f32), besides the spellings that the core reads in files and requests.
_SHORT = {stored.lower(): name for name, stored in STORED.items()} | {
    f"fp{stored[1:].lower()}": name for name, stored in STORED.items() if stored[0] == "F"
}
_PACKED = frozenset(name for name in STORED if _windlass.dtype_bits(name) < 8)
_WIDE = frozenset({"float16", "bfloat16", "float32", "float64"})
_INTEGER = frozenset(name for name in STORED if name.startswith(("int", "uint", "bool")))


def canonical_dtype(spelling: object) -> str:
    """The canonical name of a dtype; torch's own dtypes, safetensors' names and the usual short ones are accepted.

    >>> canonical_dtype("BF16"), canonical_dtype("torch.float32"), canonical_dtype("bf16"), canonical_dtype("fp16")
    ('bfloat16', 'float32', 'bfloat16', 'float16')
    """
    text = str(spelling)
    short = _SHORT.get(text.removeprefix("torch."))
    return _windlass.dtype_name(text) if short is None else short


@dataclass(frozen=True)
class DtypeRules:
    """Decides the dtype of each tensor of the image.

    >>> rules = DtypeRules("bfloat16", {"*.A_log": "float32"})
    >>> rules.dtype_of("model.norm.weight", "float32"), rules.dtype_of("layers.0.A_log", "float32")
    ('bfloat16', 'float32')
    >>> rules.dtype_of("layers.0.positions", "int64")
    'int64'
    """

    #: For floating tensors about which nothing else is said.
    generator_dtype: str | None = None
    #: By glob of image names, a dtype or a scheme; the first that matches counts.
    dtypes: Mapping[str, str] = field(default_factory=dict)
    #: Dtypes by image name, or a checkpoint (file, directory or index) whose headers give them.
    checkpoint: Mapping[str, str] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.generator_dtype is not None:
            generator = canonical_dtype(self.generator_dtype)
            if generator in _INTEGER:
                raise WindlassInvalid(f"generator_dtype {self.generator_dtype!r} is not a floating dtype")
            object.__setattr__(self, "generator_dtype", generator)
        rules = {glob: d if d in SCHEMES else canonical_dtype(d) for glob, d in self.dtypes.items()}
        object.__setattr__(self, "dtypes", rules)
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", _by_name(self.checkpoint))

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The globs that quantise."""
        return {glob: SCHEMES[value] for glob, value in self.dtypes.items() if value in SCHEMES}

    def scheme_of(self, name: str, own: object, shape: Sequence[int]) -> tuple[str, Scheme] | None:
        """How an image tensor is quantised, and the glob that says so; nothing if it is not.

        A glob leaves embeddings, output heads, routers and whatever is no 2-D weight to the rules after it. A rule that
        spells the name of such a tensor is an error if it cannot be obeyed.
        """
        for glob, value in self.dtypes.items():
            if not fnmatchcase(name, glob):
                continue
            if value not in SCHEMES:
                return None
            scheme = SCHEMES[value]
            why = scheme.why_not(name, canonical_dtype(own), shape)
            if why is None and (not is_glob(glob) or scheme.why_kept(name) is None):
                return glob, scheme
            if not is_glob(glob):
                raise WindlassInvalid(
                    f"{name!r} cannot be published as {value}: {why}",
                    f"remove dtypes[{glob!r}], or give it a dtype",
                )
        return None

    def base_of(self, name: str, own: object) -> str:
        """What an image tensor is rounded to before it is quantised: the dtype that it would have without the scheme."""
        stored = self.checkpoint.get(name) if isinstance(self.checkpoint, Mapping) else None
        if stored is not None and stored not in _WIDE:
            # That of a quantised checkpoint says nothing about what it was made from.
            return DtypeRules(self.generator_dtype, self.dtypes).base_of(name, own)
        base = self.dtype_of(name, own)
        if base not in _WIDE or base == "float64":
            raise WindlassInvalid(
                f"{name!r} would be rounded to {base} before it is quantised",
                'quantise from float32, bfloat16 or float16: set generator_dtype="bfloat16"',
            )
        return base

    def dtype_of(self, name: str, own: object) -> str:
        """The dtype of an image tensor whose parameter has the dtype `own`; of one that is quantised, see `base_of`."""
        held = canonical_dtype(own)
        if held in _INTEGER:
            return held
        for glob, dtype in self.dtypes.items():
            if dtype not in SCHEMES and fnmatchcase(name, glob):
                return _checked(name, held, dtype, f"dtypes[{glob!r}]", asked=True)
        stored = self.checkpoint.get(name) if isinstance(self.checkpoint, Mapping) else None
        if stored is not None:
            return _checked(name, held, stored, "the checkpoint", asked=False)
        if self.generator_dtype is not None:
            return _checked(name, held, self.generator_dtype, "generator_dtype", asked=True)
        return held


def _by_name(checkpoint: Mapping[str, str] | str | os.PathLike[str]) -> dict[str, str]:
    if isinstance(checkpoint, Mapping):
        return {name: canonical_dtype(dtype) for name, dtype in checkpoint.items()}
    from windlass.names.checkpoint import checkpoint_layout

    return {name: dtype for name, (dtype, _) in checkpoint_layout(checkpoint).items()}


def _checked(name: str, held: str, wanted: str, who: str, *, asked: bool) -> str:
    """The wanted dtype, if casting to it keeps the meaning.

    A user may ask for a cast into or out of 8-bit floats; a checkpoint may not, because what it has in them
    was quantised, and means nothing without the scales that stand beside it.
    """
    if held == wanted or (held in _WIDE and wanted in _WIDE):
        return wanted
    odd = {held, wanted} & (_INTEGER | _PACKED | {"complex64", "float8_e8m0fnu"})
    if odd or not asked:
        raise WindlassInvalid(
            f"{name!r} is {held}, and {who} wants {wanted}: a plain cast would change what its values mean",
            f"publish it as it is with dtypes={{{name!r}: {held!r}}}, or quantised by a scheme ({', '.join(SCHEMES)})",
        )
    return wanted
