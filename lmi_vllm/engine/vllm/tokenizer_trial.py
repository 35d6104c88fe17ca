"""A model's tokenizer is loaded and tried before its weights, which may take many minutes."""

import importlib.metadata
from collections.abc import Callable
from typing import Any, Final

from lmi_vllm.errors import EngineStartError

TEXT: Final = "The server is ready: 1, 2, 3."
_PUBLISHED: Final = "transformers_modules."  # where Transformers imports a model's own code
_TRUST: Final = ("trust_remote_code", "trust-remote-code")
_LONGEST: Final = 300


def tried(folder: str, load: Callable[[], Any]) -> Any:
    """Return the tokenizer in `folder`, after a text was encoded and decoded; None without one.

    Raises:
        EngineStartError: it cannot be loaded or used.
    """
    tokenizer = None
    try:
        tokenizer = load()
        if tokenizer is not None:
            _try_to_encode(tokenizer)
    except Exception as error:
        raise EngineStartError(_fault(folder, tokenizer, error)) from error
    return tokenizer


def _try_to_encode(tokenizer: Any) -> None:
    """Encode and decode a text; a fast tokenizer's threads stay unused, since an engine is forked.

    Raises:
        Exception: whatever its code raises.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer.encode(TEXT) if backend is None else backend.encode(TEXT).ids
    tokenizer.decode(ids)


def _fault(folder: str, tokenizer: Any, error: Exception) -> str:
    """Return what is wrong with the tokenizer in `folder`, and what to do."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    advice = (
        "check the tokenizer's files (tokenizer.json or tokenizer.model, tokenizer_config.json), "
        "or name another folder in option.tokenizer"
    )
    code = type(tokenizer).__mro__[1].__module__ if tokenizer is not None else ""
    frames = error.__traceback__
    while frames is not None:
        module = str(frames.tb_frame.f_globals.get("__name__"))
        code = module if module.startswith(_PUBLISHED) else code
        frames = frames.tb_next
    if any(word in str(error) for word in _TRUST):
        advice = "it needs code of the model's folder: option.trust_remote_code=true allows it"
    elif code.startswith(_PUBLISHED):
        release = importlib.metadata.version("transformers")
        advice = (
            f"its own code ({code.rpartition('.')[2]}.py) does not fit the installed Transformers "
            f"{release}; option.tokenizer may name a folder with a tokenizer.json"
        )
    return f"the model's tokenizer cannot be used ({folder}): {said}; {advice}"
