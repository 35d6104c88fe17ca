"""Other names of an adapter's weights, by which they fit the served model.

An adapter that was trained on a compiled or a wrapped model, or saved by hand, has further words in
the names of its weights. One of a text model has shorter names than the model in which that text
model is one of several. vLLM refuses both. They are renamed if every name then fits.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from lmi_vllm.checks.adapter_config import PREFIX, module_of
from lmi_vllm.checks.safetensors_header import Shape, Tensor

_WRAPPERS: Final = re.compile(r"(^|(?<=\.))_orig_mod\.")  # of torch.compile
_PARALLEL: Final = "module."  # of torch's data parallel
_ADAPTER: Final = re.compile(r"(?<=\.lora_[AB])\.default(?=\.weight$)|"
                             r"(?<=\.lora_embedding_[AB])\.default$")  # fmt: skip
_TEXT: Final = re.compile("language_model|text_model")
_ELSEWHERE: Final = (".experts", "lm_head")  # stored under other names


def fitting_names(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> Mapping[str, str]:
    """Return the names that change, with the ones that fit; empty if there are none that do.

    `shapes` are those of the base's weights by module; empty if they are not known.
    """
    plain = {name: plain_name(name) for name in tensors}
    moved = plain if not shapes else _moved(plain, tensors, shapes)
    return {name: new for name, new in moved.items() if new != name}


def plain_name(name: str) -> str:
    """Return a weight's name without the words of wrappers, and of PEFT's name for an adapter."""
    name = _ADAPTER.sub("", _WRAPPERS.sub("", name).removeprefix(_PARALLEL))
    rest = name.removeprefix(PREFIX)
    return (PREFIX + rest.removeprefix(_PARALLEL)) if rest != name else name


def _moved(
    plain: Mapping[str, str], tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
) -> Mapping[str, str]:
    """Return these names below the one prefix of the base where all modules are, with their shapes.

    None is returned if there is no such prefix, or several.
    """
    sides = _sides({new: tensors[name] for name, new in plain.items()})
    if all(_fits(module, pair, shapes) for module, pair in sides.items()):
        return plain
    found = [
        (old, new)
        for old, new in _prefixes(_deepest(sides), shapes)
        if all(
            module.startswith(old) and _fits(new + module.removeprefix(old), pair, shapes)
            for module, pair in sides.items()
        )
    ]
    texts = [place for place in found if _TEXT.search(place[1])]
    places = texts if len(found) > 1 else found
    if len(places) != 1:
        return {}
    ((old, new),) = places
    return {name: _below(one, old, new) for name, one in plain.items()}


def _deepest(modules: Iterable[str]) -> str:
    """Return the module whose name says most of its place: an embedding's may be one word."""
    return min(modules, key=lambda name: (-name.count("."), name), default="")


def _below(name: str, old: str, new: str) -> str:
    prefix = PREFIX if name.startswith(PREFIX) else ""
    rest = name.removeprefix(prefix)
    is_elsewhere = any(word in rest for word in _ELSEWHERE[1:])
    return name if is_elsewhere else prefix + new + rest.removeprefix(old)


def _sides(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return rows and columns of each module's product, of those that the base's files name."""
    found: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        module, part = module_of(name)
        if part in ("lora_A", "lora_B") and not any(word in module for word in _ELSEWHERE):
            found.setdefault(module, {})[part] = tensor.shape[-1 if part == "lora_A" else 0]
    return {name: (pair.get("lora_B", 0), pair.get("lora_A", 0)) for name, pair in found.items()}


def _fits(module: str, pair: tuple[int, ...], shapes: Mapping[str, Shape]) -> bool:
    return shapes.get(module) in (pair, pair[::-1])


def _prefixes(module: str, shapes: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield a prefix of the module and one of the base, for each place with the longest rest."""
    parts = module.split(".")
    for cut in range(max(1, len(parts) - 1)):
        rest = ".".join(parts[cut:])
        places = [name for name in shapes if name == rest or name.endswith(f".{rest}")]
        if places:
            old = module.removesuffix(rest)
            return [(old, name.removesuffix(rest)) for name in places]
    return ()
